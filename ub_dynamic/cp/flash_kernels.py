# SPDX-License-Identifier: Apache-2.0
"""The two GPU kernels of :mod:`ub_dynamic.cp.kernels`: torch's own flash attention and TE's cuDNN attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UBUnsupportedError
from .kernels import QKV, Gradients, OutAndLse
from .rows import take_rows
from .sections import DeviceSection


class TorchFlashKernel:
    """The variable-length flash attention that ships with torch: CUDA, float16 and bfloat16, D equal to Dv."""

    name = "torch"
    compact = True

    def fwd(self, qkv: QKV, part: DeviceSection, scale: float) -> OutAndLse:
        q, k, v = qkv
        host = part.host
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            take_rows(q, part.q_rows),
            take_rows(k, part.k_rows),
            take_rows(v, part.k_rows),
            part.q_cu,
            part.k_cu,
            host.max_q,
            host.max_k,
            0.0,
            host.causal,
            False,
            scale=scale,
        )
        if lse.dim() != 2:
            raise UBUnsupportedError(
                f"this torch returns softmax statistics of shape {tuple(lse.shape)}; packed ones, [H, T], are needed"
            )
        lse = lse.t()
        if part.q_rows is not None:
            rows = part.q_rows
            out = q.new_zeros((*q.shape[:2], v.shape[2])).index_copy_(0, rows, out)
            lse = lse.new_empty(q.shape[:2]).index_copy_(0, rows, lse)
        return out, lse

    def bwd(
        self, dout: torch.Tensor, qkv: QKV, out: torch.Tensor, lse: torch.Tensor, part: DeviceSection, scale: float
    ) -> Gradients:
        q, k, v = qkv
        host = part.host
        section_lse = lse if part.q_rows is None else lse.index_select(0, part.q_rows)
        no_dropout = torch.empty(2, dtype=torch.int64, device=q.device)  # random state, not read without dropout
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            take_rows(dout, part.q_rows),
            take_rows(q, part.q_rows),
            take_rows(k, part.k_rows),
            take_rows(v, part.k_rows),
            take_rows(out, part.q_rows),
            section_lse.t().contiguous(),
            part.q_cu,
            part.k_cu,
            host.max_q,
            host.max_k,
            0.0,
            host.causal,
            no_dropout,
            no_dropout,
            scale=scale,
        )
        return (
            _spread(dq, part.q_rows, q),
            _spread(dk, part.k_rows, k),
            _spread(dv, part.k_rows, v),
        )


class TEFusedKernel:
    """TE's cuDNN attention in the layout ``thd_thd_thd``: it reads a section in place, by first rows and counts."""

    name = "te"
    compact = False

    def __init__(self) -> None:
        try:
            from transformer_engine.pytorch.cpp_extensions import fused_attn
        except ImportError as error:
            raise UBUnsupportedError(
                f"kernel='te' needs Transformer Engine: pip install 'ub_dynamic[te]' ({error})"
            ) from error
        self._fwd: Callable[..., Any] = fused_attn.fused_attn_fwd
        self._bwd: Callable[..., Any] = fused_attn.fused_attn_bwd
        self._backend: Any = fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
        self._fwd_names = set(inspect.signature(self._fwd).parameters)
        self._bwd_names = set(inspect.signature(self._bwd).parameters)
        self._rng_state: dict[torch.device, torch.Tensor] = {}

    def fwd(self, qkv: QKV, part: DeviceSection, scale: float) -> OutAndLse:
        q, k, v = qkv
        options = self._options(part, q, scale, self._fwd_names)
        out, aux, *_ = self._fwd(is_training=True, q=q, k=k, v=v, fused_attention_backend=self._backend, **options)
        lse = aux[0]
        if lse.dim() != 3:
            raise UBUnsupportedError(
                f"this cuDNN returns softmax statistics of shape {tuple(lse.shape)}; packed ones [T, H, 1] (cuDNN 9.6, "
                f"not sm120) are needed; kernel='torch' works without"
            )
        return out, lse.squeeze(-1)

    def bwd(
        self, dout: torch.Tensor, qkv: QKV, out: torch.Tensor, lse: torch.Tensor, part: DeviceSection, scale: float
    ) -> Gradients:
        q, k, v = qkv
        options = self._options(part, q, scale, self._bwd_names)
        if "dqkv_dtype" in self._bwd_names:
            from transformer_engine.pytorch.constants import TE_DType

            options["dqkv_dtype"] = TE_DType[q.dtype]
        if q.device not in self._rng_state:
            self._rng_state[q.device] = torch.zeros(2, dtype=torch.int64, device=q.device)
        dq, dk, dv, *_ = self._bwd(
            q=q,
            k=k,
            v=v,
            o=out,
            d_o=dout,
            aux_ctx_tensors=[lse.unsqueeze(-1), self._rng_state[q.device]],
            fused_attention_backend=self._backend,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **options,
        )
        return dq, dk, dv

    def _options(self, part: DeviceSection, q: torch.Tensor, scale: float, names: set[str]) -> dict[str, Any]:
        host = part.host
        options = {
            "max_seqlen_q": host.max_q,
            "max_seqlen_kv": host.max_k,
            "cu_seqlens_q": part.q_cu,
            "cu_seqlens_kv": part.k_cu,
            "cu_seqlens_q_padded": part.q_offsets,
            "cu_seqlens_kv_padded": part.k_offsets,
            "fake_dtype": q.dtype,
            "attn_scale": scale,
            "attn_mask_type": "padding_causal" if host.causal else "padding",
            "qkv_layout": "thd_thd_thd",
        }
        # Newer versions name the formats of out and gradients, and want to know of a capture.
        newer = {
            "o_format": "thd",
            "do_format": "thd",
            "dqkv_layout": "thd_thd_thd",
            "cuda_graph": torch.cuda.is_current_stream_capturing(),
        }
        return options | {name: value for name, value in newer.items() if name in names}


def _spread(grad: torch.Tensor, rows: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return grad if rows is None else torch.zeros_like(like).index_copy_(0, rows, grad)

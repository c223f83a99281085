# SPDX-License-Identifier: Apache-2.0
"""TE's own context-parallel Python code on the CPU: the CUDA functions that it calls, written in plain torch.

Everything between `attn_forward_func_with_cp` and those functions is the installed Transformer Engine, so that what is
derived from its sources (padding rules, patches, counts of operations) is checked against the sources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel

from ub_dynamic.cp.kernels import ReferenceKernel
from ub_dynamic.cp.sections import DeviceSection, Ranges, Section
from ub_dynamic.packing import PackedBatch

FLASH_2_7 = ("v2_3_plus", "v2_4_plus", "v2_4_1_plus", "v2_5_7_plus", "v2_6_0_plus", "v2_7_0_plus")
READS: list[int] = []  # halves read so far
STRAY: list[float] = []  # what the fused backward leaves in dk and dv of keys without queries, if anything


class Stream:
    def wait_event(self, event: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def record_event(self, event: object) -> None: ...


class Event:
    def record(self, stream: object = None) -> None: ...


class CountOps(TorchDispatchMode):
    """Counts what would be a launch: dispatched operations that compute or copy, outside of emulated kernels."""

    FREE = ("view", "empty", "slice", "select", "detach", "alias", "transpose", "squeeze", "expand", "as_strided", "t.")

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func)
        if not any(free in name for free in self.FREE):
            self.ops.append(name)
        return func(*args, **(kwargs or {}))


def _kernel(function):  # type: ignore[no-untyped-def]
    """An emulated CUDA function: not counted, and given plain tensors."""

    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        with _disable_current_modes():
            plain = [x.as_subclass(torch.Tensor) if isinstance(x, torch.Tensor) else x for x in args]
            return function(*plain, **kwargs)

    return call


def _section(cu_q, cu_k, offsets_q, offsets_k, max_q, max_k, mask) -> DeviceSection:  # type: ignore[no-untyped-def]
    q, k = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert max(q, default=0) <= max_q, "max_seqlen_q is too small"
    assert max(k, default=0) <= max_k, "max_seqlen_kv is too small"
    part = Section.of(
        int(offsets_q[-1]),
        Ranges(offsets_q[:-1].long(), cu_q.diff().long()),
        Ranges(offsets_k[:-1].long(), cu_k.diff().long()),
        max_q,
        max_k,
        mask.endswith("causal"),
    )
    return DeviceSection(part, cu_q, offsets_q, cu_k, offsets_k, None, None)


@_kernel
def fused_attn_fwd(is_training, max_q, max_k, cu_q, cu_k, q, k, v, *_, **options):  # type: ignore[no-untyped-def]
    part = _section(
        cu_q,
        cu_k,
        options["cu_seqlens_q_padded"],
        options["cu_seqlens_kv_padded"],
        max_q,
        max_k,
        options["attn_mask_type"],
    )
    out, lse = ReferenceKernel().fwd((q, k, v), part, options["attn_scale"])
    return out, [lse.unsqueeze(-1), torch.zeros(2, dtype=torch.int64)]


@_kernel
def fused_attn_bwd(max_q, max_k, cu_q, cu_k, q, k, v, out, dout, dtype, aux, backend, **options):  # type: ignore[no-untyped-def]
    offsets = options["cu_seqlens_q_padded"], options["cu_seqlens_kv_padded"]
    part = _section(cu_q, cu_k, *offsets, max_q, max_k, options["attn_mask_type"])
    grads = ReferenceKernel().bwd(dout, (q, k, v), out, aux[0].squeeze(-1), part, options["attn_scale"])
    used = (cu_q.diff() > 0) & (cu_k.diff() > 0)
    for grad, start, cu in zip(grads, (offsets[0], offsets[1], offsets[1]), (cu_q, cu_k, cu_k), strict=True):
        starts, counts = start[:-1].long(), cu.diff().long()
        # Kernels may leave anything in padding; TE's binding zeroes gradients before, and no kernel comes by elsewhere.
        grad[Ranges(starts + counts, (start.diff() - counts) * used).rows()] = 7.0
    if STRAY:
        # cuDNN on Hopper: TE issue #2186.
        starts, counts, queries = offsets[1][:-1].long(), cu_k.diff().long(), cu_q.diff()
        for grad in grads[1:]:
            grad[Ranges(starts, counts * (queries == 0)).rows()] = STRAY[0]
    return (*grads, None)


@_kernel
def flash_attn_fwd(q, k, v, cu_q, cu_k, max_q, max_k, causal, softmax_scale, **options):  # type: ignore[no-untyped-def]
    part = _section(cu_q, cu_k, cu_q, cu_k, max_q, max_k, "causal" if causal else "")
    out, lse = ReferenceKernel().fwd((q, k, v), part, softmax_scale)
    return out, lse.t().contiguous(), None, torch.zeros(2, dtype=torch.int64)


@_kernel
def flash_attn_bwd(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, max_q, max_k, causal, softmax_scale, **options
):
    part = _section(cu_q, cu_k, cu_q, cu_k, max_q, max_k, "causal" if causal else "")
    for target, grad in zip(
        (dq, dk, dv), ReferenceKernel().bwd(dout, (q, k, v), out, lse.t(), part, softmax_scale), strict=True
    ):
        target.copy_(grad)


def _half_rows(cu_seqlens: torch.Tensor, half: int) -> torch.Tensor:
    bounds = cu_seqlens.tolist()
    rows = []
    for start, end in pairwise(bounds):
        middle = start + (end - start) // 2
        rows += range(middle, end) if half else range(start, middle)
    return torch.tensor(rows, dtype=torch.int64)


@_kernel
def thd_read_half_tensor(tensor, cu_seqlens, half):  # type: ignore[no-untyped-def]
    READS.append(half)
    return tensor.index_select(tensor.dim() - 3, _half_rows(cu_seqlens, half))


@_kernel
def thd_read_second_half_lse(lse, cu_seqlens, packed, length):  # type: ignore[no-untyped-def]
    return lse.index_select(1, _half_rows(cu_seqlens, 1)).contiguous()


@_kernel
def thd_second_half_lse_correction(lse, step, cu_seqlens, packed):  # type: ignore[no-untyped-def]
    rows = _half_rows(cu_seqlens, 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], step.to(lse.dtype))


@_kernel
def thd_out_correction(out, step, old_lse, lse, step_lse, cu_seqlens, second_half, packed):  # type: ignore[no-untyped-def]
    rows = _half_rows(cu_seqlens, 1) if second_half else torch.arange(out.shape[0])
    new = lse[:, rows]
    old_scale = torch.exp(old_lse[:, rows] - new).nan_to_num(0.0).t().unsqueeze(-1)
    scale = torch.exp(step_lse - new).nan_to_num(0.0).t().unsqueeze(-1)
    out[rows] = (out[rows] * old_scale + step * scale).to(out.dtype)


@_kernel
def thd_grad_correction(grad, step, cu_seqlens, first, second):  # type: ignore[no-untyped-def]
    halves = {0: first, 1: second}
    one_half = "none" in (first, second)
    for half, action in halves.items():
        rows = _half_rows(cu_seqlens, half)
        if action == "zero":
            grad[rows] = 0
        elif action != "none":
            part = step if one_half else step[rows]
            grad[rows] = part + (grad[rows] if action == "add" else 0)


def _rank_order(cu_seqlens: torch.Tensor, cp: int) -> torch.Tensor:
    bounds = cu_seqlens.tolist()
    rows = []
    for rank in range(cp):
        for start, end in pairwise(bounds):
            chunk = (end - start) // (2 * cp)
            for number in (rank, 2 * cp - 1 - rank):
                rows += range(start + number * chunk, start + (number + 1) * chunk)
    return torch.tensor(rows, dtype=torch.int64)


@_kernel
def thd_sequence_order_to_cp_rank_order(x, cu_seqlens, cp, rows):  # type: ignore[no-untyped-def]
    return x.index_select(0, _rank_order(cu_seqlens, cp))


@_kernel
def thd_cp_rank_order_to_sequence_order(x, cu_seqlens, cp, rows):  # type: ignore[no-untyped-def]
    return torch.empty_like(x).index_copy_(0, _rank_order(cu_seqlens, cp), x)


class _WaitOnce:
    """A request of gloo: unlike NCCL's, which TE waits for twice, it must not be waited for again."""

    def __init__(self, request) -> None:  # type: ignore[no-untyped-def]
        self._request = request

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
            self._request = None


_p2p = context_parallel.flash_attn_p2p_communicate


def flash_attn_p2p_communicate(*args):  # type: ignore[no-untyped-def]
    return [_WaitOnce(request) for request in _p2p(*args)]


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, TE's context-parallel code runs on CPU tensors over gloo."""
    tex = SimpleNamespace(
        **{name: function for name, function in globals().items() if name.startswith("thd_")},
    )
    stream = Stream()
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (context_parallel, "tex", tex),
            (context_parallel, "fused_attn_fwd", fused_attn_fwd),
            (context_parallel, "fused_attn_bwd", fused_attn_bwd),
            (context_parallel, "flash_attn_p2p_communicate", flash_attn_p2p_communicate),
            (context_parallel, "get_device_compute_capability", lambda: (9, 0)),
            (context_parallel, "get_cudnn_version", lambda: (9, 19, 0)),
            (context_parallel.FP8GlobalStateManager, "get_fp8_recipe", DelayedScaling),
            (backends, "_flash_attn_varlen_fwd", flash_attn_fwd),
            (backends, "_flash_attn_varlen_bwd", flash_attn_bwd),
            *((context_parallel.fa_utils, name, True) for name in FLASH_2_7),
            (torch.cuda, "current_stream", lambda *_: stream),
            (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
            (torch.cuda, "Event", Event),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def te_attention(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: PackedBatch,
    groups: dist.ProcessGroup | list[dist.ProcessGroup],
    comm_type: str,
    *,
    causal: bool = True,
    pad: bool | None = None,
    boundaries: tuple[torch.Tensor, torch.Tensor] | None = None,
    max_seqlen: int | None = None,
    fused: bool = True,
) -> torch.Tensor:
    """TE's attention under context parallelism, `[T/cp, H, D]` in and out."""
    real, padded = boundaries or tuple(vars(batch.device_metadata("cpu")).values())
    flag = batch.pad_between_seqs if pad is None else pad
    longest = max_seqlen or batch.max_seqlen
    return context_parallel.attn_forward_func_with_cp(
        True,
        *qkv,
        real,
        real,
        longest,
        longest,
        padded,
        padded,
        0.0,
        groups,
        list(range(dist.get_world_size())),
        Stream(),
        comm_type,
        qkv_format="thd",
        attn_mask_type="padding_causal" if causal else "padding",
        use_fused_attention=fused,
        window_size=(-1, 0) if causal else (-1, -1),
        pad_between_seqs=flag,
    )

# SPDX-License-Identifier: Apache-2.0
"""Attention of one section, behind two functions: forward to (out, lse), backward from them.

All tensors have the rows of the rank's buffers: q ``[rows, H, D]``, k ``[rows, Hk, D]``, v ``[rows, Hk, Dv]``, H a
multiple of Hk. ``lse`` is the natural logarithm of the softmax denominator, ``[rows, H]``. The backward takes the out
and lse of the whole softmax, not of the section alone, and returns the section's part of dq, dk and dv.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Protocol

import torch

from ..errors import UBShapeError, UBUnsupportedError
from .merge import exact
from .sections import DeviceSection

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
OutAndLse = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionKernel(Protocol):
    """``compact``: whether it needs :attr:`DeviceSection.q_rows` and ``k_rows``.

    Rows outside the section: out, dq, dk and dv are 0 there, lse is not defined. lse is float32, or float64 where
    the inputs are.
    """

    name: str
    compact: bool

    def fwd(self, qkv: QKV, part: DeviceSection, scale: float) -> OutAndLse: ...

    def bwd(
        self, dout: torch.Tensor, qkv: QKV, out: torch.Tensor, lse: torch.Tensor, part: DeviceSection, scale: float
    ) -> Gradients: ...


class ReferenceKernel:
    """Plain torch, one sequence after the other: any device and floating-point type, float64 included."""

    name = "reference"
    compact = False

    def fwd(self, qkv: QKV, part: DeviceSection, scale: float) -> OutAndLse:
        q, k, v = qkv
        out = q.new_zeros((*q.shape[:2], v.shape[2]))
        lse = torch.full(q.shape[:2], -math.inf, dtype=exact(q.dtype), device=q.device)
        for rows, keys in part.host.slices:
            scores = self._scores(q[rows], k[keys], part.host.causal, scale)
            denominator = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - denominator[..., None])
            out[rows] = _heads_last(torch.matmul(weights, _heads_first(v[keys], q.shape[1]))).to(q.dtype)
            lse[rows] = denominator.t()
        return out, lse

    def bwd(
        self, dout: torch.Tensor, qkv: QKV, out: torch.Tensor, lse: torch.Tensor, part: DeviceSection, scale: float
    ) -> Gradients:
        q, k, v = qkv
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        heads = q.shape[1]
        for rows, keys in part.host.slices:
            weights = torch.exp(self._scores(q[rows], k[keys], part.host.causal, scale) - lse[rows].t()[..., None])
            grad = _heads_first(dout[rows], heads)
            delta = (grad * _heads_first(out[rows], heads)).sum(-1, keepdim=True)
            upstream = torch.matmul(grad, _heads_first(v[keys], heads).transpose(1, 2))
            scores = weights * (upstream - delta) * scale
            dq[rows] = _heads_last(torch.matmul(scores, _heads_first(k[keys], heads))).to(q.dtype)
            dk[keys] = _sum_groups(torch.matmul(scores.transpose(1, 2), _heads_first(q[rows], heads)), k)
            dv[keys] = _sum_groups(torch.matmul(weights.transpose(1, 2), grad), v)
        return dq, dk, dv

    def _scores(self, q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        heads = q.shape[1]
        scores = torch.matmul(_heads_first(q, heads), _heads_first(k, heads).transpose(1, 2)) * scale
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        return scores


def _flash(name: str) -> Callable[[], AttentionKernel]:
    def make() -> AttentionKernel:
        from . import flash_kernels

        return getattr(flash_kernels, name)()

    return make


_KERNELS: dict[str, Callable[[], AttentionKernel]] = {
    "reference": ReferenceKernel,
    "torch": _flash("TorchFlashKernel"),
    "te": _flash("TEFusedKernel"),
}


def choose_kernel(name: str, q: torch.Tensor, v: torch.Tensor) -> AttentionKernel:
    """The kernel called ``name``, checked against the inputs; ``"auto"`` takes the fastest that can compute them.

    That is ``"te"`` where TE is installed, then ``"torch"``, both for float16 and bfloat16 on CUDA, else
    ``"reference"``. Raises :class:`UBUnsupportedError` where a named kernel cannot.
    """
    if name == "auto":
        candidates = ["te"] if importlib.util.find_spec("transformer_engine") else []
        usable = (one for one in (*candidates, "torch") if cannot(one, q, v) is None)
        return _kernel(next(usable, "reference"))
    if name not in _KERNELS:
        raise UBShapeError(f"kernel = {name!r}: it must be 'auto' or one of {', '.join(map(repr, _KERNELS))}")
    if reason := cannot(name, q, v):
        raise UBUnsupportedError(f"kernel {name!r} cannot compute this attention: {reason}")
    return _kernel(name)


def cannot(name: str, q: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why kernel ``name`` cannot take these inputs, or None."""
    if name == "reference":
        return None if q.is_floating_point() else f"the inputs are {q.dtype}"
    if not q.is_cuda:
        return f"it needs CUDA tensors, these are on {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the inputs are {q.dtype}"
    size, value_size = q.shape[2], v.shape[2]
    if size % 8 or value_size % 8 or max(size, value_size) > 256:
        return f"head sizes {size} and {value_size}: multiples of 8 up to 256 are needed"
    if name == "torch" and size != value_size:
        return f"head sizes {size} of q and k and {value_size} of v must be equal"
    return None


@functools.cache
def _kernel(name: str) -> AttentionKernel:
    return _KERNELS[name]()


def _heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[rows, heads or groups, D]`` as ``[heads, rows, D]`` in the exact type."""
    x = x.to(exact(x.dtype)).transpose(0, 1)
    return x if x.shape[0] == heads else x.repeat_interleave(heads // x.shape[0], dim=0)


def _heads_last(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


def _sum_groups(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    groups = like.shape[1]
    return _heads_last(grad.unflatten(0, (groups, -1)).sum(1)).to(like.dtype)

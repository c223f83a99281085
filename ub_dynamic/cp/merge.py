# SPDX-License-Identifier: Apache-2.0
"""Merge the partial softmaxes of ring steps, in float32 (float64 where the inputs are).

With parts ``o_i`` and logarithms of their denominators ``l_i`` a row is ``sum_i exp(l_i - L) * o_i``, where
``L = log(sum_i exp(l_i))``. Parts are kept in the kernels' type and read once: one launch for up to four of them on
CUDA (:mod:`.merge_triton`), plain torch elsewhere.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # out [rows, H, Dv], lse [rows, H], uint8 mask [rows]
FOLD = 4  # parts that are merged at once, and that wait in memory


class Merge:
    """Collects parts; :meth:`finish` returns their merged out, in the parts' type, and lse ``[rows, H]``.

    A row that no part's mask names gets out 0 and lse -inf; where a mask is 0, lse is not read. ``empty``: what out
    would be without any part.
    """

    def __init__(self, empty: Callable[[], torch.Tensor]) -> None:
        self._empty = empty
        self._parts: list[Part] = []
        self._sum: tuple[torch.Tensor, torch.Tensor] | None = None  # out and lse so far, in the exact type

    def add(self, out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor) -> None:
        if len(self._parts) == FOLD:
            self._sum = merge_parts(self._parts, self._sum, exact(out.dtype))
            self._parts = []
        self._parts.append((out, lse, mask))

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._parts:
            out = self._empty()
            return out, torch.full(out.shape[:2], -math.inf, dtype=exact(out.dtype), device=out.device)
        return merge_parts(self._parts, self._sum, self._parts[0][0].dtype)


def merge_parts(
    parts: list[Part], before: tuple[torch.Tensor, torch.Tensor] | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge ``parts`` and what was merged ``before``; out in ``dtype``, lse in the exact type."""
    kernel = triton_merge() if parts[0][0].is_cuda and exact(dtype) == torch.float32 else None
    return (kernel or merge_torch)(parts, before, dtype)


def merge_torch(
    parts: list[Part], before: tuple[torch.Tensor, torch.Tensor] | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`merge_parts` on any device."""
    kind = exact(parts[0][0].dtype)
    masked = [lse.to(kind).masked_fill(mask.unsqueeze(1) == 0, -math.inf) for _, lse, mask in parts]
    outs = [out for out, _, _ in parts]
    if before is not None:
        outs.append(before[0])
        masked.append(before[1])
    total = torch.logsumexp(torch.stack(masked), dim=0)
    floor = total.masked_fill(total == -math.inf, 0.0)  # a row without keys: exp(-inf - 0) = 0
    merged = torch.zeros(outs[0].shape, dtype=kind, device=total.device)
    for out, lse in zip(outs, masked, strict=True):
        merged += torch.exp(lse - floor).unsqueeze(-1) * out
    return merged.to(dtype), total


def exact(dtype: torch.dtype) -> torch.dtype:
    """The type in which softmaxes of ``dtype`` are merged."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def triton_merge() -> Callable[..., Any] | None:
    """The one-launch merge, or None, with a warning, where Triton cannot be used."""
    try:
        from .merge_triton import merge_triton
    except ImportError as error:
        warnings.warn(f"merging ring steps takes several launches: Triton cannot be imported ({error})", stacklevel=2)
        return None
    return merge_triton

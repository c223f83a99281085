# SPDX-License-Identifier: Apache-2.0
"""What TE's ring attention derives from boundary tensors on the device, step by step, made on the host instead.

All of it depends on the batch and the ring alone: one copy a microbatch serves every step of every layer.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch

from ..packing import PackedBatch
from .plan import copy_tensors, zigzag_counts


class BoundaryTables:
    """int32 boundaries ``[sequences + 1]`` of ``batch`` on ``device`` for a ring of ``ring`` ranks, of which it knows
    the padded ones divided by ``ring`` and by ``2*ring``, and every rank's real ones.

    :class:`UBStateError` during CUDA graph capture, which would freeze the values of one batch.
    """

    def __init__(self, batch: PackedBatch, ring: int, device: torch.device) -> None:
        self._batch, self._ring, self._device = batch, ring, device
        divisors = (ring, 2 * ring)
        padded = torch.tensor(batch.cu_seqlens_padded)
        host = [padded // by for by in divisors]
        keys = list(product(range(ring), ((True, True), (True, False), (False, True)))) if batch.has_padding else []
        zero = torch.zeros(1, dtype=torch.int64)
        host += [torch.cat([zero, zigzag_counts(batch, ring, rank, *halves).cumsum(0)]) for rank, halves in keys]
        tensors = copy_tensors(device, [one.to(torch.int32) for one in host])
        self.quotients = dict(zip(divisors, tensors, strict=False))
        self.of_half = self.quotients[2 * ring]
        self._real = dict(zip(keys, tensors[2:], strict=False))
        self._masks: dict[int, torch.Tensor] = {}

    def real(self, rank: int, first: bool, second: bool) -> torch.Tensor:
        """Cumulative real tokens in the first, the second or both chunks of ``rank``."""
        if not self._batch.has_padding:
            return self.quotients[self._ring if first and second else 2 * self._ring]
        return self._real[rank, (first, second)]

    def padding_mask(self, rank: int) -> torch.Tensor:
        """bool ``[T / ring]``: rows of ``rank`` that hold no real token."""
        if rank not in self._masks:
            real = zigzag_counts(self._batch, self._ring, rank)
            rows = torch.tensor(self._batch.padded) // self._ring
            row = torch.arange(int(rows.sum())) - (rows.cumsum(0) - rows).repeat_interleave(rows)
            (self._masks[rank],) = copy_tensors(self._device, [row >= real.repeat_interleave(rows)])
        return self._masks[rank]


@lru_cache(maxsize=16)
def boundary_tables(batch: PackedBatch, ring: int, device: torch.device) -> BoundaryTables:
    """The tables of a batch, made once."""
    return BoundaryTables(batch, ring, device)


def tail_safe_padding_mask(rows: int, real: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """bool ``[rows]``, from boundaries on the device: rows behind real tokens, the tail included.

    For rows behind the last sequence TE 2.20's own looks up one too many and ends in a device-side assert.
    """
    row = torch.arange(rows, dtype=padded.dtype, device=padded.device)
    sequence = torch.searchsorted(padded[1:].contiguous(), row, right=True).clamp_(max=padded.shape[0] - 2)
    return row >= (padded[:-1] + real.diff())[sequence]

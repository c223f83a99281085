# SPDX-License-Identifier: Apache-2.0
"""What TE's ring attention derives from boundary tensors on the device, step by step, made on the host instead.

All of it depends on the batch and the ring alone: one copy a microbatch serves every step of every layer.

A sequence whose last chunks hold no real token has ring steps with keys but without queries. On Hopper cuDNN's
backward may then leave in dk and dv what its workspace held (TE issue #2186), and TE adds it to the gradients of real
tokens. No query, no gradient: such keys are counted as none here.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch

from ..packing import PackedBatch
from .plan import copy_tensors, zigzag_counts

Halves = tuple[bool, bool]
# By section of TE's ring: the chunks (first, second) of the queries, and those of the keys.
_SECTIONS: dict[str, tuple[Halves, Halves]] = {
    "lower-triangle": ((True, True), (True, False)),
    "upper-triangle": ((False, True), (True, True)),
    "all": ((True, True), (True, True)),
}


class BoundaryTables:
    """int32 boundaries ``[sequences + 1]`` of ``batch`` on ``device`` for a ring of ``ring`` ranks, of which it knows
    the padded ones divided by ``ring`` and by ``2*ring``, every rank's real ones, and the keys that queries of
    ``rank`` see.

    :class:`UBStateError` during CUDA graph capture, which would freeze the values of one batch.
    """

    def __init__(self, batch: PackedBatch, ring: int, rank: int, device: torch.device) -> None:
        self._batch, self._ring, self._device = batch, ring, device
        divisors = (ring, 2 * ring)
        padded = torch.tensor(batch.cu_seqlens_padded)
        host = [padded // by for by in divisors]
        keys = list(product(range(ring), ((True, True), (True, False), (False, True)))) if batch.has_padding else []
        zero = torch.zeros(1, dtype=torch.int64)
        host += [torch.cat([zero, zigzag_counts(batch, ring, rank, *halves).cumsum(0)]) for rank, halves in keys]
        seen = _keys_seen(batch, ring, rank) if batch.has_padding else {}
        host += [torch.cat([zero, counts.cumsum(0)]) for counts in seen.values()]
        tensors = copy_tensors(device, [one.to(torch.int32) for one in host])
        self.quotients = dict(zip(divisors, tensors, strict=False))
        self.of_half = self.quotients[2 * ring]
        self._real = dict(zip(keys, tensors[2:], strict=False))
        self._seen = dict(zip(seen, tensors[2 + len(keys) :], strict=True))
        self._masks: dict[int, torch.Tensor] = {}

    def real(self, rank: int, first: bool, second: bool) -> torch.Tensor:
        """Cumulative real tokens in the first, the second or both chunks of ``rank``."""
        if not self._batch.has_padding:
            return self.quotients[self._ring if first and second else 2 * self._ring]
        return self._real[rank, (first, second)]

    def keys_seen(self, section: str, step: int) -> torch.Tensor | None:
        """Cumulative keys of a section in a ring step without those that no query sees; None where there are none."""
        return self._seen.get((section, step))

    def padding_mask(self, rank: int) -> torch.Tensor:
        """bool ``[T / ring]``: rows of ``rank`` that hold no real token."""
        if rank not in self._masks:
            real = zigzag_counts(self._batch, self._ring, rank)
            rows = torch.tensor(self._batch.padded) // self._ring
            row = torch.arange(int(rows.sum())) - (rows.cumsum(0) - rows).repeat_interleave(rows)
            (self._masks[rank],) = copy_tensors(self._device, [row >= real.repeat_interleave(rows)])
        return self._masks[rank]


@lru_cache(maxsize=16)
def boundary_tables(batch: PackedBatch, ring: int, rank: int, device: torch.device) -> BoundaryTables:
    """The tables of a batch, made once."""
    return BoundaryTables(batch, ring, rank, device)


def _keys_seen(batch: PackedBatch, ring: int, rank: int) -> dict[tuple[str, int], torch.Tensor]:
    """By section and step the real keys of every sequence that queries of ``rank`` see, where that is not all."""
    seen = {}
    for step, (section, (queries, keys)) in product(range(1, ring), _SECTIONS.items()):
        has_queries = zigzag_counts(batch, ring, rank, *queries) > 0
        counts = zigzag_counts(batch, ring, (rank - step) % ring, *keys)
        if bool((counts[~has_queries] > 0).any()):
            seen[section, step] = counts * has_queries
    return seen


def keys_seen_on_device(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Cumulative ``keys`` (int32 ``[sequences + 1]``) without those of sequences that have no ``queries``."""
    seen = torch.zeros_like(keys)
    seen[1:] = (keys.diff() * (queries.diff() > 0)).cumsum(0)
    return seen


def unseen_keys(batch: PackedBatch, ring: int) -> tuple[int, ...]:
    """The entries of which some step of TE's ring over ``ring`` ranks has keys but no queries.

    That is where the last of ``2*ring`` chunks holds no real token. On Hopper their dk and dv, those of real tokens
    included, are not defined in TE (issue #2186): in a ring without ``te_backward_patches``, and with all_gather.
    """
    entries = enumerate(zip(batch.seqlens, batch.padded, strict=True))
    return tuple(at for at, (real, rows) in entries if ring > 1 and 0 < real <= rows - rows // (2 * ring))


def tail_safe_padding_mask(rows: int, real: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """bool ``[rows]``, from boundaries on the device: rows behind real tokens, the tail included.

    For rows behind the last sequence TE 2.20's own looks up one too many and ends in a device-side assert.
    """
    row = torch.arange(rows, dtype=padded.dtype, device=padded.device)
    sequence = torch.searchsorted(padded[1:].contiguous(), row, right=True).clamp_(max=padded.shape[0] - 2)
    return row >= (padded[:-1] + real.diff())[sequence]

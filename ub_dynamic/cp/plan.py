# SPDX-License-Identifier: Apache-2.0
"""The steps of hierarchical attention for one batch on one rank: host arithmetic, copied to a device once.

Ranks are ``r = p*A + a``: A ranks of an inner group share the heads, P inner groups form a ring. After the
all-to-all an inner group p holds its A ranks' rows, sorted here by packed row, so that every sequence's real tokens
come first. Under the zigzag that is the zigzag over P: chunks p and ``2*P-1-p`` of ``2*P`` of every sequence. Step i
of the ring multiplies p's queries with the keys of group ``(p - i) % P``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from ..errors import UBStateError
from ..metadata import indexed
from ..packing import PackedBatch
from .partition import Partition
from .sections import DeviceSection, Ranges, Section

_ALIGN = 64  # bytes between two tables in the one buffer


@dataclass(frozen=True, eq=False)
class RingPlan:
    """What one rank does with a batch.

    ``rows``: ``T / P``, rows after the all-to-all. ``order``: of the rows as they arrive from the inner group, rank
    by rank, which come next in sequence order; ``inverse``: the way back; both int64, None for the identity.
    ``steps``: the section of every ring step, possibly an empty one.
    """

    rows: int
    order: torch.Tensor | None
    inverse: torch.Tensor | None
    steps: tuple[Section, ...]
    _on_device: dict[tuple[torch.device, bool], DevicePlan] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device, compact: bool) -> DevicePlan:
        """The tables on ``device``, copied once; with ``compact`` also the indices of each section's rows.

        :class:`UBStateError` if the copy would fall into a CUDA graph capture.
        """
        where = indexed(device)
        if (where, compact) not in self._on_device:
            self._on_device[where, compact] = DevicePlan.copy(self, where, compact)
        return self._on_device[where, compact]


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A :class:`RingPlan` on a device. ``mask``: uint8 ``[steps, rows]``, whether a step has a part in a row."""

    order: torch.Tensor | None
    inverse: torch.Tensor | None
    steps: tuple[DeviceSection, ...]
    mask: torch.Tensor

    @classmethod
    def copy(cls, plan: RingPlan, device: torch.device, compact: bool) -> DevicePlan:
        parts = [one.tables() for one in plan.steps]
        rows = [(one.q.rows(), one.k.rows()) if compact else () for one in plan.steps]
        mask = torch.zeros(len(plan.steps), plan.rows, dtype=torch.uint8)
        for step, one in enumerate(plan.steps):
            mask[step, one.q.rows()] = 1
        permutations = [] if plan.order is None or plan.inverse is None else [plan.order, plan.inverse]
        flat = [*permutations, mask, *(table for one in parts for table in one), *(r for pair in rows for r in pair)]
        copied = iter(copy_tensors(device, flat))
        order, inverse = (next(copied), next(copied)) if permutations else (None, None)
        mask = next(copied)
        tables = [tuple(next(copied) for _ in one) for one in parts]
        sections = []
        for one, four, pair in zip(plan.steps, tables, rows, strict=True):
            # Rows are left in place where they are all rows.
            indices = [_unless_all(next(copied), plan.rows) for _ in pair]
            sections.append(DeviceSection(one, *four, *(indices or (None, None))))
        return cls(order, inverse, tuple(sections), mask)


@lru_cache(maxsize=32)
def ring_plan(batch: PackedBatch, partition: Partition, inner: int, outer: int, rank: int, causal: bool) -> RingPlan:
    """The plan of inner group ``rank`` (0 .. outer-1) for ``batch``, whose cp is ``inner * outer``.

    Raises :class:`UBUnsupportedError` for a mask that ``partition`` is not exact for.
    """
    partition.check("causal" if causal else "no_mask", batch)
    arriving = torch.cat([partition.indices(batch, rank * inner + a) for a in range(inner)])
    order = torch.argsort(arriving)
    sorted_already = bool((order == torch.arange(order.numel())).all())
    if causal:
        steps = _causal_steps(batch, outer, rank)
    else:
        steps = _full_steps(batch, partition, inner, outer, rank)
    if sorted_already:
        return RingPlan(order.numel(), None, None, steps)
    return RingPlan(order.numel(), order, torch.argsort(order), steps)


@lru_cache(maxsize=32)
def chunk_counts(batch: PackedBatch, parts: int) -> torch.Tensor:
    """int64 ``[2*parts, sequences]``: real tokens of every sequence in each of its ``2*parts`` equal chunks."""
    size = torch.tensor(batch.padded) // (2 * parts)
    before = torch.arange(2 * parts).unsqueeze(1) * size
    return torch.minimum((torch.tensor(batch.seqlens) - before).clamp_(min=0), size)


def zigzag_counts(batch: PackedBatch, parts: int, rank: int, first: bool = True, second: bool = True) -> torch.Tensor:
    """Real tokens of every sequence in its chunks ``rank`` (``first``) and ``2*parts-1-rank`` (``second``)."""
    if parts == 1 and first and second:
        return torch.tensor(batch.seqlens)  # without context parallelism a length may be odd
    chunks = [rank] * first + [2 * parts - 1 - rank] * second
    return chunk_counts(batch, parts)[chunks].sum(0)


def _causal_steps(batch: PackedBatch, outer: int, rank: int) -> tuple[Section, ...]:
    """Under the zigzag: the own keys causally, then an earlier group's first chunk or, with the second chunk of
    queries, a later group's both."""
    starts = torch.tensor(batch.cu_seqlens_padded[:-1]) // outer
    middles = starts + torch.tensor(batch.padded) // (2 * outer)
    rows, longest = batch.total_tokens // outer, batch.max_seqlen // outer

    mine = Ranges(starts, zigzag_counts(batch, outer, rank))
    steps = [Section.of(rows, mine, mine, longest, longest, causal=True)]
    for step in range(1, outer):
        source = (rank - step) % outer
        if source < rank:
            keys = Ranges(starts, zigzag_counts(batch, outer, source, second=False))
            steps.append(Section.of(rows, mine, keys, longest, longest // 2))
        else:
            queries = Ranges(middles, zigzag_counts(batch, outer, rank, first=False))
            keys = Ranges(starts, zigzag_counts(batch, outer, source))
            steps.append(Section.of(rows, queries, keys, longest // 2, longest))
    return tuple(steps)


def _full_steps(batch: PackedBatch, partition: Partition, inner: int, outer: int, rank: int) -> tuple[Section, ...]:
    starts = torch.tensor(batch.cu_seqlens_padded[:-1]) // outer
    rows, longest = batch.total_tokens // outer, batch.max_seqlen // outer

    def real(group: int) -> Ranges:
        if not batch.has_padding:
            return Ranges(starts, torch.tensor(batch.padded) // outer)
        members = range(group * inner, (group + 1) * inner)
        counts = [torch.tensor(partition.real_counts(batch, one)).sum(1) for one in members]
        return Ranges(starts, torch.stack(counts).sum(0))

    mine = real(rank)
    sources = [(rank - step) % outer for step in range(outer)]
    return tuple(Section.of(rows, mine, real(source), longest, longest) for source in sources)


def copy_tensors(device: torch.device, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Host tensors of any types on ``device``, in one asynchronous copy on the current stream."""
    on_cuda = device.type == "cuda"
    if on_cuda and torch.cuda.is_current_stream_capturing():
        raise UBStateError("attention tables copied during CUDA graph capture: run the batch once before the capture")
    sizes = [-(-one.numel() * one.element_size() // _ALIGN) * _ALIGN for one in tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_cuda)
    for piece, one in zip(buffer.split(sizes), tensors, strict=True):
        piece[: one.numel() * one.element_size()] = one.flatten().view(torch.uint8)
    copied = buffer.to(device, non_blocking=True)
    return [
        piece[: one.numel() * one.element_size()].view(one.dtype).view(one.shape)
        for piece, one in zip(copied.split(sizes), tensors, strict=True)
    ]


def _unless_all(index: torch.Tensor, rows: int) -> torch.Tensor | None:
    return None if index.numel() == rows else index

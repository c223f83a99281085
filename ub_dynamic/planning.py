# SPDX-License-Identifier: Apache-2.0
"""Group documents into packed microbatches: under a token budget with little waste, or a fixed number each.

The packing is a first-fit decreasing of our own, forty lines and no dependency: documents by falling length,
each into the first microbatch that has room, found in a tree of the room left. O(n log n), a few seconds for
a million documents, at most 11/9 of the fewest microbatches possible plus one, and the same result on every
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple, overload

import torch

from . import metadata
from .errors import UBCapacityError, UBShapeError
from .packing import Lengths, PackedBatch
from .packing_rules import (
    Tail,
    as_count,
    as_counts,
    batch_multiple,
    document_lengths,
    optional_counts,
    round_up,
    rule,
    sequence_multiple,
)


class Span(NamedTuple):
    """Tokens ``start`` to ``stop`` of a document: all of them, unless it was split."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class PlannedMicrobatch:
    """The spans of one microbatch, in packed order, and their layout; ``spans[i]`` is its entry i."""

    spans: tuple[Span, ...]
    batch: PackedBatch

    @property
    def documents(self) -> tuple[int, ...]:
        """The index of each span's document."""
        return tuple(span.document for span in self.spans)


@dataclass(frozen=True)
class Plan(Sequence[PlannedMicrobatch]):
    """Microbatches in order of their first document, and their cost. ``max_tokens``: the budget of each."""

    microbatches: tuple[PlannedMicrobatch, ...]
    max_tokens: int

    @overload
    def __getitem__(self, index: int) -> PlannedMicrobatch: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[PlannedMicrobatch, ...]: ...

    def __getitem__(self, index: int | slice) -> PlannedMicrobatch | tuple[PlannedMicrobatch, ...]:
        return self.microbatches[index]

    def __len__(self) -> int:
        return len(self.microbatches)

    def __iter__(self) -> Iterator[PlannedMicrobatch]:
        return iter(self.microbatches)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """T of every microbatch."""
        return tuple(each.batch.total_tokens for each in self.microbatches)

    @cached_property
    def real_tokens(self) -> int:
        """Tokens of documents in all microbatches."""
        return sum(each.batch.real_tokens for each in self.microbatches)

    @property
    def waste(self) -> float:
        """Share of ``len(self) * max_tokens`` that holds no token: what padding to the budget would cost."""
        return 1 - self.real_tokens / (len(self) * self.max_tokens)

    @property
    def padding_fraction(self) -> float:
        """Share of the rows that are processed, the sum of T, that hold no token."""
        return 1 - self.real_tokens / sum(self.tokens)


def plan_microbatches(
    lengths: Lengths,
    max_tokens: int,
    *,
    tp: int = 1,
    cp: int = 1,
    align: int = 1,
    too_long: Literal["error", "split"] = "error",
    max_documents: int | None = None,
    tail: Tail = "ghost",
) -> Plan:
    """Pack every document exactly once into microbatches of at most ``max_tokens`` rows each.

    ``max_tokens``: largest T of a microbatch over all CP ranks, everything rounded up included; it is also
    the capacity of its :class:`PackedBatch`, which gets ``tp``, ``cp``, ``align`` and ``tail``.
    ``max_documents``: most spans in one microbatch. ``too_long``: a document that does not fit into a
    microbatch of its own is a :class:`UBCapacityError`, or is split into spans of the largest valid T and a
    rest; spans are sequences of their own, so attention does not cross from one to the next. Within a
    microbatch documents keep their order.
    """
    lengths = _host_lengths(lengths)
    max_tokens, tp, cp, align = as_counts(max_tokens=max_tokens, tp=tp, cp=cp, align=align)
    (max_documents,) = optional_counts(max_documents=max_documents)
    if too_long not in ("error", "split"):
        raise UBShapeError(f"too_long = {too_long!r}: it must be 'error' or 'split'")
    multiple = batch_multiple(tp, cp, align)
    room = max_tokens - max_tokens % multiple
    if room == 0:
        raise UBCapacityError(f"max_tokens = {max_tokens}: {rule(tp, cp, align)}; the next valid value is {multiple}")
    if too_long == "error":
        _check_longest(lengths, room, max_tokens, cp)
    spans = list(chain.from_iterable(_spans(index, length, room) for index, length in enumerate(lengths)))
    unit = sequence_multiple(cp)
    rows = [round_up(span.stop - span.start, unit) for span in spans]
    bins = _first_fit_decreasing(rows, room, max_documents or len(rows))
    groups = sorted(sorted(members) for members in bins)
    layout = {"tp": tp, "cp": cp, "align": align, "capacity": max_tokens, "tail": tail}
    return Plan(tuple(_microbatch([spans[i] for i in group], layout) for group in groups), max_tokens)


def plan_fixed_count(
    lengths: Lengths,
    documents_per_microbatch: int,
    *,
    tp: int = 1,
    cp: int = 1,
    align: int = 1,
    tail: Tail = "ghost",
) -> Plan:
    """Microbatches of so many documents, in the given order, as fine-tuning does; the last may be smaller.

    ``max_tokens`` of the plan is the largest T that occurs, the capacity to register communicators for.
    """
    lengths = _host_lengths(lengths)
    tp, cp, align = as_counts(tp=tp, cp=cp, align=align)
    many = as_count("documents_per_microbatch", documents_per_microbatch)
    layout = {"tp": tp, "cp": cp, "align": align, "tail": tail}
    spans = [Span(index, 0, length) for index, length in enumerate(lengths)]
    groups = (spans[i : i + many] for i in range(0, len(spans), many))
    microbatches = tuple(_microbatch(group, layout) for group in groups)
    return Plan(microbatches, max(each.batch.total_tokens for each in microbatches))


def _host_lengths(lengths: Lengths) -> tuple[int, ...]:
    return document_lengths(metadata.host_list(lengths, "lengths") if isinstance(lengths, torch.Tensor) else lengths)


def _check_longest(lengths: tuple[int, ...], room: int, max_tokens: int, cp: int) -> None:
    unit = sequence_multiple(cp)
    too_long = [index for index, length in enumerate(lengths) if round_up(length, unit) > room]
    if too_long:
        index = max(too_long, key=lambda i: (lengths[i], -i))
        raise UBCapacityError(
            f"document {index} has {lengths[index]} tokens, {round_up(lengths[index], unit)} rows: a "
            f"microbatch of max_tokens = {max_tokens} holds at most {room}; {len(too_long)} of "
            f"{len(lengths)} documents are too long; crop them, or pass too_long='split'"
        )


def _spans(document: int, length: int, room: int) -> Iterator[Span]:
    for start in range(0, max(length, 1), room):
        yield Span(document, start, min(start + room, length))


def _microbatch(spans: Sequence[Span], layout: dict[str, Any]) -> PlannedMicrobatch:
    lengths = [span.stop - span.start for span in spans]
    if not any(lengths):
        raise UBShapeError(
            f"documents {[span.document for span in spans[:8]]} would make a microbatch without any token: "
            f"drop documents of length 0, or allow more documents in a microbatch"
        )
    return PlannedMicrobatch(tuple(spans), PackedBatch.from_lengths(lengths, **layout))


def _first_fit_decreasing(rows: Sequence[int], room: int, most: int) -> list[list[int]]:
    """Bins of indices into ``rows`` with a sum of at most ``room`` each, and at most ``most`` indices."""
    leaves = 1 << (len(rows) - 1).bit_length()  # a bin for every index is enough
    free = [room] * (2 * leaves)  # a binary tree: free[i] is the most room in any bin below node i
    bins: list[list[int]] = []
    falling = sorted(range(len(rows)), key=rows.__getitem__, reverse=True)
    for need, equal in groupby(falling, key=rows.__getitem__):
        waiting = list(equal)
        while waiting:
            node = 1
            while node < leaves:  # down to the first bin with room
                node *= 2
                node += free[node] < need
            if node - leaves == len(bins):
                bins.append([])
            members = bins[node - leaves]
            # First fit would choose this bin again for as many of equal length as it holds.
            count = min(len(waiting), most - len(members), free[node] // need if need else len(waiting))
            members += waiting[:count]
            del waiting[:count]
            free[node] = free[node] - need * count if len(members) < most else -1
            while node > 1:  # and back up, as far as anything changes
                node //= 2
                best = max(free[2 * node], free[2 * node + 1])
                if free[node] == best:
                    break
                free[node] = best
    return bins

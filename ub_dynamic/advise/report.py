# SPDX-License-Identifier: Apache-2.0
"""What microbatches of these lengths cost: padded to the capacity, to a few buckets, and at exactly T.

T is what a tensor-parallel group and its communicators see: the rows of a packed microbatch over ``cp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ..backends.names import resolve_specs
from ..errors import UBAlignmentError, UBCapacityError, UBShapeError
from ..packing_rules import as_count, batch_multiple, sequence_multiple
from ..rules import TokenRule, combine, token_rule
from ..shapes import CommSpec, registered_rows
from .buckets import best_borders, padded_to
from .distribution import Counting, Distribution, Integers
from .filling import fill_fixed, fill_packed, windows

Plan = Literal["packed", "fixed"]
StepTime = Callable[[Integers], np.ndarray]
"""T of microbatches -> the time that each takes, in any unit."""

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_DOCUMENTS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Workload:
    """How documents become microbatches.

    ``capacity``: the T that communicators are registered for; a microbatch holds at most ``cp * capacity`` rows.
    ``plan``: ``"packed"``, best fit within windows of ``window`` documents, or ``"fixed"``, ``documents`` a
    microbatch in the order of the file. ``hidden``: H, for the bytes of the buffers. Raises the
    :class:`UBShapeError` family for a capacity that the communicators could not take.
    """

    capacity: int
    tp: int = 1
    cp: int = 1
    hidden: int | None = None
    plan: Plan = "packed"
    window: int = 1024
    documents: int = 4

    def __post_init__(self) -> None:
        for name in ("capacity", "tp", "cp", "window", "documents"):
            object.__setattr__(self, name, as_count(name, getattr(self, name)))
        if self.hidden is not None:
            object.__setattr__(self, "hidden", as_count("hidden", self.hidden))
        if self.plan not in ("packed", "fixed"):
            raise UBShapeError(f"plan = {self.plan!r}: it is 'packed' or 'fixed'")
        self.specs()
        if self.room() == 0:
            multiple = batch_multiple(self.tp, self.cp, self.rule().multiple)
            raise UBCapacityError(f"capacity = {self.capacity}: the smallest valid T is {multiple // self.cp}")

    def specs(self) -> tuple[CommSpec, ...]:
        """TE's default communicators at this capacity; none at tp 1, or where H is not known."""
        if self.capacity % self.tp:
            following = self.capacity + self.tp - self.capacity % self.tp
            raise UBAlignmentError(
                f"capacity = {self.capacity} is not a multiple of tp = {self.tp}; the next valid value is {following}"
            )
        if self.tp == 1 or self.hidden is None:
            return ()
        return resolve_specs((self.capacity, self.hidden), self.tp, torch.bfloat16)

    def rule(self) -> TokenRule:
        """Which T are valid; without H, as for any usual one."""
        following = [token_rule(spec) for spec in self.specs() if spec.method != "external"]
        return combine(following or [TokenRule(self.tp, self.tp, self.capacity)], self.capacity)

    def room(self) -> int:
        """The most rows of a microbatch over all CP ranks."""
        rule = self.rule()
        most = self.cp * rule.maximum
        return most - most % batch_multiple(self.tp, self.cp, rule.multiple)

    def tokens(self, rows: Integers) -> Integers:
        """T of microbatches whose documents fill so many rows."""
        rule = self.rule()
        multiple = batch_multiple(self.tp, self.cp, rule.multiple)
        return np.maximum(-(-rows // multiple) * multiple // self.cp, rule.minimum)


@dataclass(frozen=True)
class Strategy:
    """One way to give microbatches their shape.

    ``tokens``: the sum of T over all microbatches. ``waste``: share of it that holds no token of a document.
    ``graphs``: different T, so many CUDA graphs at least. ``time_ratio``: predicted step time over that of padding to
    the capacity. ``borders``: the T of its buckets, empty where there are none.
    """

    name: str
    tokens: int
    waste: float
    graphs: int
    time_ratio: float
    borders: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """All that was found. ``tokens``: the distribution of T; ``real_tokens``: tokens of documents in them.

    ``too_long``: documents of more rows than a microbatch has, which ``packed`` splits. ``too_large``: microbatches
    of ``fixed`` beyond the capacity; no other figure counts them, and ``largest_needed`` is the T that would hold
    all. ``fewest``: no packing has fewer microbatches. ``buffer_bytes`` and ``needed_bytes``: what one rank
    registers at this capacity, and at the largest T that occurs; None without H, 0 at tp 1.
    """

    workload: Workload
    lengths: Distribution
    tokens: Distribution
    real_tokens: int
    too_long: int
    too_large: int
    largest_needed: int
    fewest: int
    buffer_bytes: int | None
    needed_bytes: int | None
    strategies: tuple[Strategy, ...]

    @property
    def padded(self) -> Strategy:
        """Every microbatch padded to the capacity."""
        return self.strategies[0]

    @property
    def exact(self) -> Strategy:
        """T as the documents need it."""
        return self.strategies[-1]


def advise(
    lengths: Iterable[Integers],
    workload: Workload,
    *,
    buckets: Iterable[int] = (2, 4, 8, 16),
    step_time: StepTime | None = None,
) -> Report:
    """What microbatches of documents of these ``lengths`` would gain from an active shape.

    ``lengths``: blocks of int64, as :func:`~ub_dynamic.advise.read_lengths` yields them; none is kept.
    ``buckets``: numbers of buckets to show, each with its best borders and with equal ones. ``step_time``: by default
    a microbatch takes time in proportion to T. Raises :class:`UBShapeError` where no microbatch has a token.
    """
    seen, filled = Counting(), Counting()
    unit, room = sequence_multiple(workload.cp), workload.room()
    size = workload.window if workload.plan == "packed" else _whole(workload.documents)
    real_tokens = 0
    for block in windows(_watched(lengths, seen), size):
        if workload.plan == "packed":
            real_tokens += fill_packed(block, unit, room, filled)
        else:
            real_tokens += fill_fixed(block, unit, workload.documents, room, filled)
    filled.counted.pop(0, None)  # documents of length 0 only
    if not filled.counted:
        raise UBShapeError("no document has a token, so there is no microbatch")
    rows, documents = filled.distribution(), seen.distribution()
    fits = rows.values <= room
    inside = Distribution(rows.values[fits], rows.counts[fits])
    if not len(inside):
        raise UBCapacityError(
            f"none of {len(rows)} microbatches fits into the capacity of {workload.capacity}: the largest has "
            f"T = {int(workload.tokens(rows.values[-1:])[0])}"
        )
    tokens = inside.mapped(workload.tokens(inside.values))
    padded = -(-documents.values // unit) * unit
    return Report(
        workload=workload,
        lengths=documents,
        tokens=tokens,
        real_tokens=real_tokens,
        too_long=int(documents.counts[padded > room].sum()),
        too_large=len(rows) - len(inside),
        largest_needed=int(workload.tokens(rows.values[-1:])[0]),
        fewest=-(-rows.total // room),
        buffer_bytes=_registered(workload, workload.capacity),
        needed_bytes=_registered(workload, tokens.largest),
        strategies=tuple(_strategies(workload, tokens, real_tokens, buckets, step_time)),
    )


def _watched(blocks: Iterable[Integers], seen: Counting) -> Iterable[Integers]:
    for block in blocks:
        seen.add(block)
        yield block


def _whole(documents: int) -> int:
    return max(_DOCUMENTS_AT_ONCE // documents, 1) * documents


def _registered(workload: Workload, tokens: int) -> int | None:
    """Bytes that one rank registers for all of TE's default communicators at a capacity of ``tokens``."""
    if workload.tp > 1 and workload.hidden is None:
        return None
    return sum(
        registered_rows(spec.method, spec.collective, tokens, spec.tp) * spec.capacity[1] * spec.dtype.itemsize
        for spec in workload.specs()
    )


def _strategies(
    workload: Workload, tokens: Distribution, real_tokens: int, buckets: Iterable[int], step_time: StepTime | None
) -> Iterable[Strategy]:
    time = step_time or (lambda values: values)
    whole = float(np.asarray(time(np.array([workload.capacity])), float)[0]) * len(tokens)

    def strategy(name: str, shapes: Distribution, borders: Iterable[int] = ()) -> Strategy:
        seconds = float(np.asarray(time(shapes.values), float) @ shapes.counts)
        waste = 1 - real_tokens / (workload.cp * shapes.total)
        return Strategy(name, shapes.total, waste, len(shapes.values), seconds / whole, tuple(borders))

    yield strategy("pad to capacity", Distribution(np.array([workload.capacity]), np.array([len(tokens)])))
    for number in sorted({as_count("buckets", each) for each in buckets}):
        step = -(-workload.capacity // number)
        step = int(workload.tokens(np.array([step * workload.cp]))[0])
        equal = np.minimum(np.arange(step, workload.capacity + step, step), workload.capacity)
        yield strategy(f"{number} equal buckets", padded_to(tokens, equal), map(int, equal))
        borders = best_borders(tokens, number)
        yield strategy(f"{number} best buckets", padded_to(tokens, np.array(borders)), borders)
    yield strategy("exact T", tokens)

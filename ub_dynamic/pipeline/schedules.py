# SPDX-License-Identifier: Apache-2.0
"""1F1B and interleaved 1F1B as plain generators: what one rank does, in order, and nothing about how.

A model of ``pp * vpp`` stages is cut so that chunk ``v`` of rank ``r`` is stage ``v * pp + r`` (Megatron's
interleaved placement; ``vpp`` is its virtual pipeline size, 1 without interleaving).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..errors import UBShapeError

Kind = Literal["forward", "backward"]
ScheduleName = Literal["1f1b", "interleaved", "forward"]


class Action(NamedTuple):
    """One pass of one microbatch through one chunk of a rank."""

    kind: Kind
    chunk: int
    microbatch: int


def one_f_one_b(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """``pp - rank - 1`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    return interleaved_1f1b(rank, pp, 1, microbatches, warmup=pp - rank - 1)


def interleaved_1f1b(rank: int, pp: int, vpp: int, microbatches: int, *, warmup: int | None = None) -> Iterator[Action]:
    """Interleaved 1F1B (arXiv:2104.04473, section 2.2): microbatches go through the chunks in groups of ``pp``.

    Any number of microbatches will do: what is left over a multiple of ``pp`` is spread over the groups.
    """
    _check(rank, pp, vpp, microbatches)
    forwards = list(_passes("forward", pp, vpp, microbatches))
    backwards = _passes("backward", pp, vpp, microbatches)
    if warmup is None:
        warmup = 2 * (pp - rank - 1) + (vpp - 1) * _groups(pp, microbatches)[0]
    warmup = min(warmup, len(forwards))
    yield from forwards[:warmup]
    for forward in forwards[warmup:]:
        yield forward
        yield next(backwards)
    yield from backwards


def forward_only(rank: int, pp: int, vpp: int, microbatches: int) -> Iterator[Action]:
    """Inference: the forwards of :func:`interleaved_1f1b` alone."""
    _check(rank, pp, vpp, microbatches)
    return _passes("forward", pp, vpp, microbatches)


def make_schedule(name: ScheduleName, rank: int, pp: int, vpp: int, microbatches: int) -> Iterator[Action]:
    """The schedule called ``name``; ``"1f1b"`` takes one chunk a rank."""
    if name == "1f1b":
        if vpp != 1:
            raise UBShapeError(f"1f1b has one chunk a rank, not vpp = {vpp}: use the interleaved schedule, or vpp = 1")
        return one_f_one_b(rank, pp, microbatches)
    if name == "interleaved":
        return interleaved_1f1b(rank, pp, vpp, microbatches)
    if name == "forward":
        return forward_only(rank, pp, vpp, microbatches)
    raise UBShapeError(f'schedule {name!r}: it is "1f1b", "interleaved" or "forward"')


def _passes(kind: Kind, pp: int, vpp: int, microbatches: int) -> Iterator[Action]:
    """Every pass of one kind: groups of microbatches, each through all chunks (backwards: last chunk first)."""
    chunks = tuple(range(vpp)) if kind == "forward" else tuple(reversed(range(vpp)))
    first = 0
    for size in _groups(pp, microbatches):
        for chunk in chunks:
            for microbatch in range(first, first + size):
                yield Action(kind, chunk, microbatch)
        first += size


def _groups(pp: int, microbatches: int) -> list[int]:
    """Sizes of the groups, the largest first, none below ``pp`` where that is possible.

    A group smaller than the one before it would make ranks wait for each other: its forward in a later chunk
    would come before the backward of the larger group that it depends on.
    """
    count = max(1, microbatches // pp)
    return [microbatches // count + (index < microbatches % count) for index in range(count)]


def check_sizes(pp: int, vpp: int, microbatches: int) -> None:
    """:class:`UBShapeError` for a size below 1."""
    for name, value in (("pp", pp), ("vpp", vpp), ("microbatches", microbatches)):
        if value < 1:
            raise UBShapeError(f"{name} = {value}: it must be at least 1")


def _check(rank: int, pp: int, vpp: int, microbatches: int) -> None:
    check_sizes(pp, vpp, microbatches)
    if not 0 <= rank < pp:
        raise UBShapeError(f"rank = {rank} is not one of the pp = {pp} ranks 0 to {pp - 1}")

# SPDX-License-Identifier: Apache-2.0
"""The arithmetic behind a packed batch: which lengths and which T are valid, and how a tail is covered.

Rules for T, the rows of a packed tensor over all ``cp`` context-parallel (CP) ranks, with ``align`` the token
multiple of the tensor-parallel (TP) communicators:

- every padded length is a multiple of ``2*cp`` when cp > 1, since the load-balanced split gives each rank two
  of ``2*cp`` equal chunks of every sequence (``context_parallel.cu`` of Transformer Engine);
- ``T / cp``, the rows on one rank, is a multiple of ``tp``, the sequence-parallel split, and of ``align``;
- so T is a multiple of ``lcm(2*cp, cp*tp, cp*align)``. Padding every sequence to that would be wasteful:
  only the end of the batch is filled up.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from math import lcm
from typing import Any, Literal, get_args

from .errors import UBAlignmentError, UBCapacityError, UBShapeError, shown
from .shapes import as_int

Tail = Literal["ghost", "ghost_padding", "extend_last", "error"]
TAILS: tuple[Tail, ...] = get_args(Tail)

GHOST_TOKENS = 128  # ghosts are cut into such pieces, so that attention over a tail costs time linear in it
MAX_GHOSTS = 1024  # ... and into no more than this: kernels keep cu_seqlens in shared memory


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def sequence_multiple(cp: int) -> int:
    """What every padded length is a multiple of: ``2*cp``, or 1 without context parallelism."""
    return 2 * cp if cp > 1 else 1


def batch_multiple(tp: int = 1, cp: int = 1, align: int = 1) -> int:
    """What T of a whole packed batch is a multiple of: ``lcm(2*cp, cp*tp, cp*align)``."""
    return lcm(sequence_multiple(cp), cp * tp, cp * align)


def rule(tp: int, cp: int, align: int) -> str:
    """The rule of :func:`batch_multiple` with its numbers, for error texts."""
    terms = ([f"2*cp = {2 * cp}"] if cp > 1 else []) + [f"cp*tp = {cp * tp}", f"cp*align = {cp * align}"]
    return f"T must be a multiple of {batch_multiple(tp, cp, align)}, the lcm of {', '.join(terms)}"


def integers(values: Any, what: str) -> tuple[int, ...]:
    """``values`` as a tuple of Python ints, numpy's included; :class:`UBShapeError` for anything else."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UBShapeError(f"{what} must be a sequence of ints, got {values!r}")
    try:
        values = tuple(values)
    except TypeError as error:  # an array of no dimension calls itself iterable
        raise UBShapeError(f"{what} must be a sequence of ints, got {values!r}") from error
    types = set(map(type, values))
    if types == {int}:
        return values
    if bool in types:
        index = list(map(type, values)).index(bool)
        raise UBShapeError(f"{what} must hold ints, got a bool at index {index}")
    try:
        return tuple(map(operator.index, values))
    except TypeError as error:
        raise UBShapeError(f"{what} must hold ints: {error}") from error


def document_lengths(values: Any) -> tuple[int, ...]:
    """``values`` as lengths of documents, each at least 0, at least one of them."""
    lengths = integers(values, "lengths")
    if not lengths:
        raise UBShapeError("lengths is empty: at least one document is needed")
    if min(lengths) < 0:
        index, length = next((i, n) for i, n in enumerate(lengths) if n < 0)
        raise UBShapeError(f"lengths[{index}] = {length}: a length must be at least 0")
    return lengths


def boundary_lengths(values: Any, what: str) -> tuple[int, ...]:
    """The lengths between cumulative boundaries ``[0, ...]``."""
    boundaries = integers(values, what)
    if len(boundaries) < 2 or boundaries[0] != 0:
        raise UBShapeError(
            f"{what} starts {list(boundaries[:3])}: it must start with 0 and hold one boundary more than "
            f"there are sequences"
        )
    lengths = tuple(map(operator.sub, boundaries[1:], boundaries))
    for index, length in enumerate(lengths):
        if length < 0:
            raise UBShapeError(
                f"{what}[{index + 1}] = {boundaries[index + 1]}: boundaries must not decrease, and the one "
                f"before is {boundaries[index]}"
            )
    return lengths


def as_count(name: str, value: Any) -> int:
    """``value`` as a Python int of at least 1, numpy's included; :class:`UBShapeError` for anything else."""
    number = as_int(value)
    if number is None or number < 1:
        raise UBShapeError(f"{name} = {shown(value)}: it must be an int of at least 1")
    return number


def as_counts(**values: Any) -> tuple[int, ...]:
    """Each of ``values`` as :func:`as_count` takes it."""
    return tuple(as_count(name, value) for name, value in values.items())


def optional_counts(**values: Any) -> tuple[int | None, ...]:
    """Each of ``values`` that is not None as :func:`as_count` takes it."""
    return tuple(None if value is None else as_count(name, value) for name, value in values.items())


def check_entries(seqlens: tuple[int, ...], padded: tuple[int, ...], cp: int) -> None:
    """Real and padded lengths fit together, and every padded one can be cut into ``2*cp`` chunks."""
    if len(seqlens) != len(padded):
        raise UBShapeError(f"{len(seqlens)} real and {len(padded)} padded lengths: there must be as many")
    for index, (length, rows) in enumerate(zip(seqlens, padded, strict=True)):
        if not 0 <= length <= rows:
            raise UBShapeError(
                f"sequence {index} has {length} tokens in {rows} rows: a real length must be at least 0 and "
                f"at most its padded length"
            )
    unit = sequence_multiple(cp)
    for index, rows in enumerate(padded if unit > 1 else ()):
        if rows % unit:
            raise UBAlignmentError(
                f"sequence {index} takes {rows} rows: with cp = {cp} every padded length must be a multiple "
                f"of 2*cp = {unit}; the next valid value is {round_up(rows, unit)}"
            )


def check_total(total: int, sequences: int, tp: int, cp: int, align: int, capacity: int | None) -> None:
    """T is positive, a valid multiple, and within the capacity."""
    if total == 0:
        raise UBShapeError(
            f"T = 0: {sequences} sequence(s) of length 0; T must be positive, skip the microbatch on all ranks instead"
        )
    multiple = batch_multiple(tp, cp, align)
    if total % multiple:
        raise UBAlignmentError(f"T = {total}: {rule(tp, cp, align)}; the next valid T is {round_up(total, multiple)}")
    if capacity is not None and total > capacity:
        raise UBCapacityError(
            f"T = {total} tokens exceed the capacity of {capacity}; the largest valid T is "
            f"{capacity - capacity % multiple} ({rule(tp, cp, align)})"
        )


def valid_total(
    filled: int, sequences: int, tp: int, cp: int, align: int, capacity: int | None, bucket: int | None
) -> int:
    """T for documents that fill ``filled`` rows: rounded up by the rule, then to a bucket or the capacity."""
    multiple = batch_multiple(tp, cp, align)
    total = round_up(filled, multiple)
    check_total(total, sequences, tp, cp, align, capacity)
    if bucket is None:
        return total
    if bucket % multiple:
        raise UBAlignmentError(
            f"bucket = {bucket}: {rule(tp, cp, align)}; the next valid bucket is {round_up(bucket, multiple)}"
        )
    total = round_up(total, bucket)
    return total if capacity is None else min(total, capacity - capacity % multiple)


def cover_tail(
    seqlens: tuple[int, ...],
    padded: tuple[int, ...],
    total: int,
    unit: int,
    tail: Tail,
    slots: int | None,
    max_seqlen: int | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Real and padded lengths that reach up to ``total``, with empty entries up to ``slots``."""
    if tail not in TAILS:
        raise UBShapeError(f"tail = {tail!r}: it must be one of {', '.join(TAILS)}")
    documents, filled = len(padded), sum(padded)
    gap = total - filled
    if gap and tail == "error":
        raise UBAlignmentError(
            f"T = {filled}: with tail='error' the documents must fill a valid T, and the next one is "
            f"{total}; tail='ghost' or tail='extend_last' covers the other {gap} rows"
        )
    if gap and tail == "extend_last":
        padded = (*padded[:-1], padded[-1] + gap)
    elif gap:
        free = MAX_GHOSTS if slots is None else max(slots - documents, 1)
        pieces = ghost_pieces(gap, unit, free, max_seqlen)
        attend = tail == "ghost" and seqlens == padded
        seqlens += pieces if attend else (0,) * len(pieces)
        padded += pieces
    if slots is None:
        return seqlens, padded
    if len(padded) > slots:
        raise UBCapacityError(
            f"slots = {slots}: {documents} documents and {len(padded) - documents} ghost sequences need "
            f"more; the next valid value is {len(padded)}"
        )
    empty = (0,) * (slots - len(padded))
    return seqlens + empty, padded + empty


def ghost_pieces(gap: int, unit: int, most: int, longest: int | None) -> tuple[int, ...]:
    """``gap`` rows as ghosts: multiples of ``unit``, at most ``most`` unless ``longest`` forbids it."""
    piece = round_up(max(GHOST_TOKENS, -(-gap // most)), unit)
    if longest is not None:
        piece = max(min(piece, longest - longest % unit), unit)
    whole, rest = divmod(gap, piece)
    return (piece,) * whole + ((rest,) if rest else ())

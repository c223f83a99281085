# SPDX-License-Identifier: Apache-2.0
"""How full microbatches get: rows of documents in each, without keeping which document is where.

``packed`` is best fit decreasing, the way most trainers pack: within a window of documents, a global batch, by
falling length, each into the fullest microbatch that still has room. Documents of one length are placed together, so
the work grows with the number of different lengths in a window.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

import numpy as np

from .distribution import Counting, Integers


def windows(blocks: Iterable[Integers], size: int) -> Iterator[Integers]:
    """The same lengths in arrays of ``size`` each; the last one may be shorter."""
    rest = np.empty(0, np.int64)
    for block in blocks:
        rest = np.concatenate((rest, block))
        whole = len(rest) - len(rest) % size
        yield from rest[:whole].reshape(-1, size)
        rest = rest[whole:]
    if len(rest):
        yield rest


def fill_packed(lengths: Integers, unit: int, room: int, filled: Counting) -> int:
    """Pack one window; counts the rows of its microbatches in ``filled``, and returns their tokens.

    ``unit``: every document takes a multiple of so many rows. ``room``: rows of a microbatch, a multiple of ``unit``.
    A document of more than ``room`` tokens is split into full microbatches and a rest.
    """
    tokens = int(lengths.sum())
    too_long = lengths > room
    if too_long.any():
        filled.add_pairs([(room, int((lengths // room).sum()))])
        lengths = lengths % room
    for left, bins in best_fit(-(-lengths // unit), room // unit).items():
        filled.add_pairs([(room - left * unit, bins)])
    return tokens


def best_fit(sizes: Integers, room: int) -> dict[int, int]:
    """Best fit decreasing of ``sizes`` into bins of ``room``: room that is left -> number of such bins."""
    bins: dict[int, int] = {}
    rooms: list[int] = []  # the keys of bins that are not 0, ascending
    distinct, counts = np.unique(sizes[sizes > 0], return_counts=True)
    for need, wanted in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while wanted:
            at = bisect_left(rooms, need)
            old = at < len(rooms)
            left = rooms[at] if old else room
            # A bin that was chosen stays the best fit for its length until it has no room for one more.
            each = min(left // need, wanted)
            used = wanted // each
            if old:
                used = min(used, bins[left])
                if used == bins[left]:
                    del bins[left], rooms[at]
                else:
                    bins[left] -= used
            rest = left - each * need
            if rest in bins:
                bins[rest] += used
            else:
                bins[rest] = used
                if rest:
                    insort(rooms, rest)
            wanted -= used * each
    return bins


def fill_fixed(lengths: Integers, unit: int, documents: int, room: int, filled: Counting) -> int:
    """So many ``documents`` a microbatch, in order, the last one with what is left.

    Counts the rows of its microbatches in ``filled``, and returns the tokens of those that have at most ``room``.
    """
    starts = np.arange(0, len(lengths), documents)
    rows = np.add.reduceat(-(-lengths // unit) * unit, starts)
    filled.add(rows)
    return int(np.add.reduceat(lengths, starts)[rows <= room].sum())

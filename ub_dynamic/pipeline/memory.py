# SPDX-License-Identifier: Apache-2.0
"""What the block store and the receive buffers of a rank hold: measured, and foretold from the tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .buffers import BufferPool
from .routes import BlockRoutes
from .schedules import Action
from .store import BlockStore


@dataclass(frozen=True)
class MemoryReport:
    """Of one rank and one step. ``store_peak_bytes``: most that the store held at once, values and gradients
    (``store_left_bytes``: at the end). ``buffers``: receive buffers made since the transport began, all of
    capacity, ``buffer_bytes`` in all; ``buffers_leased``: in use at the end."""

    store_peak_bytes: int
    store_left_bytes: int
    buffers: int
    buffer_bytes: int
    buffers_leased: int

    @classmethod
    def of(cls, store: BlockStore, pool: BufferPool) -> MemoryReport:
        return cls(store.peak_bytes, store.live_bytes, pool.made, pool.nbytes, pool.leased)


def store_peak(routes: BlockRoutes, rank: int, plan: Iterable[Action], rows: Sequence[int], row_bytes: int) -> int:
    """The peak bytes of a rank's store in a schedule, from the tables alone.

    ``rows[i]``: rows of microbatch i on one rank (T / tp); ``row_bytes``: H times the bytes of an element.
    """
    blocks = [0] * len(rows)  # values and gradients held, by microbatch
    peak = 0
    for stage, action in ((action.chunk * routes.pp + rank, action) for action in plan):
        if action.kind == "backward":  # the gradients of what this chunk brought in have just been taken
            blocks[action.microbatch] = len(routes.held_at_entry[stage])
        elif routes.keeps(stage):
            blocks[action.microbatch] += len(routes.received(stage)) + len(routes.commits[stage])
        else:
            blocks[action.microbatch] = 0
        held = sum(count * row_count for count, row_count in zip(blocks, rows, strict=True))
        peak = max(peak, held * row_bytes)
    return peak

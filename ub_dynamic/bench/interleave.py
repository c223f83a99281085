# SPDX-License-Identifier: Apache-2.0
"""Arms that are compared take turns in short blocks; a ratio is taken between blocks of the same round.

A machine warms up, its clocks drift, and an arm that follows a heavy one meets a hotter device. So every arm follows
every other equally often (a Williams design), in turns that are drawn anew each time (the clocks of a GPU at its power
limit go up and down, and a fixed order could keep step with them) and then reversed (an arm that comes first meets a
device that has waited). The time of a block is that of the slowest rank, and a comparison is the median of the ratios
within the rounds, with its 95 % interval. Times are milliseconds a step throughout.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_MS = 40.0  # a block of steps takes about so long
LEAST_STEPS = 5  # a block has at least so many, also where a step is longer

Block = Callable[[str, int], float]
"""``(arm, steps)`` -> milliseconds a step of a block of so many steps, on this rank."""
Gather = Callable[[Any], list[Any]]
"""A value of this rank -> those of all ranks, in order; the decisions below are taken from them, so they are equal."""


def rounds_of(count: int) -> list[list[int]]:
    """Orders of ``count`` arms in which each follows each other equally often (Williams 1949).

    ``count`` rounds for an even number, twice as many (each order and its reverse) for an odd one: ABBA for two.
    """
    first = [0]
    for step in range(1, count):
        first.append((first[-1] + (step if step % 2 else -step)) % count)
    rounds = [[(arm + turn) % count for arm in first] for turn in range(count)]
    return rounds if count % 2 == 0 or count == 1 else [order for each in rounds for order in (each, each[::-1])]


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, and the ends of its 95 % interval, which need not be equally far from it."""

    median: float
    low: float
    high: float

    def fields(self, name: str) -> dict[str, float]:
        """Of a row: ``name``, ``name_low`` and ``name_high``."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """The median of the ratios of blocks of the same round.

    The interval is that of the order statistics, which assumes no distribution: the narrowest pair ``x(k+1)``,
    ``x(n-k)`` between which the median lies with at least 95 % (as many ratios below it as heads in n throws of a
    coin; Conover, "Practical Nonparametric Statistics"). Up to eight rounds that is the whole range that was seen; of
    less than six not even the range has 95 %.
    """
    found = sorted(one / other for one, other in zip(over, under, strict=True))
    outside = _outside(len(found))
    return Ratio(statistics.median(found), found[outside], found[-1 - outside])


def _outside(count: int) -> int:
    """How many order statistics lie beyond either end of the 95 % interval of a median."""
    heads, ways, fewer = 0, 1, 1  # ways of so many heads, and of at most so many, of 2**count
    while 40 * fewer <= 2**count:  # 2.5 % on either side
        heads += 1
        ways = ways * (count - heads + 1) // heads
        fewer += ways
    return max(heads - 1, 0)


def spread(times: Sequence[float]) -> float:
    """Half the interquartile range: how far a single block usually is from the median."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2


def slowest(gather: Gather, times: Sequence[float]) -> list[float]:
    """Each time as the slowest rank has it: the others wait for that one in the next collective."""
    return [max(each) for each in zip(*gather(list(times)), strict=True)]


def is_over(gather: Gather, mine: bool) -> bool:
    """Whether the time is over on any rank, the same answer on all: each has a clock, and an end, of its own."""
    return any(gather(mine))


def calibrate(
    arms: Sequence[str], block: Block, gather: Gather, block_ms: float = BLOCK_MS, least: int = LEAST_STEPS
) -> dict[str, int]:
    """Warm every arm up, and say how many steps make a block of it."""
    times = slowest(gather, [block(arm, least) for arm in arms])
    return {arm: max(least, round(block_ms / max(ms, 1e-6))) for arm, ms in zip(arms, times, strict=True)}


def interleaved(
    arms: Sequence[str],
    block: Block,
    gather: Gather,
    until: float,
    *,
    least: int = 2,
    block_ms: float = BLOCK_MS,
    least_steps: int = LEAST_STEPS,
    settle: bool = False,
    between: Callable[[], object] = gc.collect,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[float]]:
    """Every block of every arm, the slowest rank's: as many whole sets of rounds as end before ``until``
    (seconds of ``clock``), and ``least`` in any case. The blocks of one round have the same index.

    ``settle``: a first set is not counted. A GPU that was idle runs faster than its power allows, then slower.
    """
    counts = calibrate(arms, block, gather, block_ms, least_steps)
    turns = drawn_turns(arms)
    if settle:
        one_set(arms, block, counts, {arm: [] for arm in arms})
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    done, duration = 0, 0.0
    while done < least or not is_over(gather, clock() + duration >= until):
        begin = clock()
        between()
        one_set(next(turns), block, counts, taken)
        done, duration = done + 1, clock() - begin
    return dict(zip(arms, (slowest(gather, taken[arm]) for arm in arms), strict=True))


def drawn_turns(arms: Sequence[str]) -> Iterator[list[str]]:
    """The arms in random order, then in the reverse of it, and so on; on every rank the same."""
    draw = random.Random(0)
    while True:
        turn = draw.sample(arms, len(arms))
        yield turn
        yield turn[::-1]


def one_set(arms: Sequence[str], block: Block, counts: dict[str, int], taken: dict[str, list[float]]) -> None:
    """Rounds in which each arm follows each other equally often."""
    for order in rounds_of(len(arms)):
        one_round([arms[index] for index in order], block, counts, taken)


def one_round(order: Sequence[str], block: Block, counts: dict[str, int], taken: dict[str, list[float]]) -> None:
    """One block of each arm, in this order, as this rank sees it."""
    for arm in order:
        taken[arm].append(block(arm, counts[arm]))


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector is off: a collection takes longer than many a step."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

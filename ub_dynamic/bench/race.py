# SPDX-License-Identifier: Apache-2.0
"""Many candidates for one place: all run at first, the clearly slower ones drop out, the rest is measured well.

The rule that decides is aware of noise: a candidate takes the place of the default only if the whole 95 % interval of
its time over the default's (:func:`~.interleave.ratio`) lies below 1: its upper end, not the median and a width. With
less than :data:`LEAST_ROUNDS` rounds nothing is decided. Among those, the smallest median wins. So two equal
candidates do not change places from one run to the next, and noise alone changes nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from .interleave import Block, Gather, calibrate, is_over, one_round, ratio, rounds_of, slowest, spread

LEAST_ROUNDS = 6  # six equal candidates in a row below 1 by chance: 1 in 64
FIRST_ROUNDS = 2  # after so many rounds the field is cut
CUT = 1.15  # a candidate that is slower than the best by more than this is no more measured
Times = Mapping[str, Sequence[float]]
"""Milliseconds a step of each arm, one a round; an arm that dropped out has fewer."""


def race(
    arms: Sequence[str],
    block: Block,
    gather: Gather,
    until: float,
    *,
    beside: Sequence[str] = (),
    most_rounds: int = 16,
    block_ms: float = 20.0,
    least_steps: int = 3,
    between: Callable[[], object] = gc.collect,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[float]]:
    """Measure ``arms``, of which the first is the default, until ``until`` or for ``most_rounds`` rounds.

    ``beside``: arms that are measured with them, and take no part. The default is never dropped, and
    :data:`LEAST_ROUNDS` rounds run in any case. All ranks do the same, as every decision is taken from times that all
    of them have.
    """
    standing = [*arms, *beside]
    counts = calibrate(standing, block, gather, block_ms, least_steps)
    taken: dict[str, list[float]] = {arm: [] for arm in standing}
    duration = 0.0
    for number in range(most_rounds):
        if number >= LEAST_ROUNDS and is_over(gather, clock() + duration > until):
            break
        begin = clock()
        between()
        orders = rounds_of(len(standing))
        mine: dict[str, list[float]] = {arm: [] for arm in standing}
        one_round([standing[index] for index in orders[number % len(orders)]], block, counts, mine)
        for arm, worst in zip(standing, slowest(gather, [mine[arm][0] for arm in standing]), strict=True):
            taken[arm].append(worst)
        if number + 1 == FIRST_ROUNDS:
            standing = [*survivors(arms, taken), *beside]
        duration = clock() - begin
        if len(standing) == 1 + len(beside):
            break
    return taken


def survivors(arms: Sequence[str], taken: Times) -> list[str]:
    """The default (the first), and what is at most :data:`CUT` times the best."""
    middle = {arm: statistics.median(taken[arm]) for arm in arms}
    limit = CUT * min(middle.values())
    return [arm for arm in arms if arm == arms[0] or middle[arm] <= limit]


def pick(arms: Sequence[str], taken: Times) -> tuple[str, str]:
    """The arm that wins over the default (``arms[0]``) by the rule of this module, and the reason as a text."""
    default = arms[0]
    others = [arm for arm in arms[1:] if len(taken[arm]) >= LEAST_ROUNDS]
    if not others:
        return default, _nobody(arms, len(taken[default]))
    found = {arm: ratio(taken[arm], taken[default][: len(taken[arm])]) for arm in others}
    faster = [arm for arm in others if found[arm].high < 1]
    best = min(faster or others, key=lambda arm: found[arm].median)
    if not faster:
        return default, f"no candidate is surely faster ({best}: {found[best]} times the time of {default})"
    return best, f"{found[best]} times the time of {default}, {len(taken[best])} rounds"


def _nobody(arms: Sequence[str], rounds: int) -> str:
    if len(arms) == 1:
        return "there is no other candidate here"
    if rounds < LEAST_ROUNDS and rounds != FIRST_ROUNDS:
        return f"only {rounds} rounds were measured"
    return f"every other candidate is slower than {CUT:.2f} times the best"


def summary(times: Sequence[float]) -> tuple[float, float]:
    """Median and spread in microseconds."""
    return 1000 * statistics.median(times), 1000 * spread(times)

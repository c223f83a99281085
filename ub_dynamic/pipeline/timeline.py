# SPDX-License-Identifier: Apache-2.0
"""When a schedule's passes would run: every rank in its own order, every pass after what it depends on.

Sends do not block and a receive waits, as in :mod:`ub_dynamic.pipeline.p2p`; transfers take no time here. A
schedule whose ranks would wait for each other forever raises instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import UBStateError
from .schedules import Action, ScheduleName, check_sizes, make_schedule

Cost = Callable[[Action], float]


@dataclass(frozen=True)
class Bar:
    """One pass on the time axis (in the unit of the cost)."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All passes of all ranks. ``duration``: the end of the last one."""

    pp: int
    vpp: int
    bars: tuple[Bar, ...]
    duration: float

    def of_rank(self, rank: int) -> tuple[Bar, ...]:
        return tuple(bar for bar in self.bars if bar.rank == rank)

    def busy(self, rank: int) -> float:
        return sum(bar.end - bar.start for bar in self.of_rank(rank))

    def bubble(self, rank: int) -> float:
        """Share of the duration in which the rank has nothing to do."""
        return 1.0 - self.busy(rank) / self.duration

    def peak_in_flight(self, rank: int) -> int:
        """Most (chunk, microbatch) pairs whose forward is done and whose backward is not: activations held."""
        now = peak = 0
        for bar in self.of_rank(rank):
            now += 1 if bar.action.kind == "forward" else -1
            peak = max(peak, now)
        return peak


def unit_cost(action: Action) -> float:
    """A backward takes twice as long as a forward."""
    return 1.0 if action.kind == "forward" else 2.0


def token_cost(tokens: Sequence[int], vpp: int = 1) -> Cost:
    """As :func:`unit_cost`, in proportion to the tokens of each microbatch (the mean is 1)."""
    mean = sum(tokens) / len(tokens)
    return lambda action: unit_cost(action) * tokens[action.microbatch] / mean


def timeline(name: ScheduleName, pp: int, vpp: int, microbatches: int, cost: Cost = unit_cost) -> Timeline:
    """The timeline of a schedule by name."""
    check_sizes(pp, vpp, microbatches)
    return simulate([list(make_schedule(name, rank, pp, vpp, microbatches)) for rank in range(pp)], vpp, cost)


def simulate(plans: Sequence[Sequence[Action]], vpp: int, cost: Cost = unit_cost) -> Timeline:
    """Run the plans of all ranks against each other; :class:`UBStateError` names who would wait for what forever."""
    pp = len(plans)
    done: dict[tuple[str, int, int], float] = {}
    position, free = [0] * pp, [0.0] * pp
    bars: list[Bar] = []
    progress = True
    while progress:
        progress = False
        for rank, plan in enumerate(plans):
            while position[rank] < len(plan):
                action = plan[position[rank]]
                stage = action.chunk * pp + rank
                needed = _needs(action, stage, pp * vpp)
                if needed is not None and needed not in done:
                    break
                start = max(free[rank], done[needed] if needed else 0.0)
                free[rank] = done[action.kind, stage, action.microbatch] = start + cost(action)
                bars.append(Bar(rank, action, start, free[rank]))
                position[rank] += 1
                progress = True
    stuck = [rank for rank in range(pp) if position[rank] < len(plans[rank])]
    if stuck:
        waits = ", ".join(f"rank {rank} at {plans[rank][position[rank]]}" for rank in stuck)
        raise UBStateError(f"the ranks would wait for each other forever: {waits}")
    return Timeline(pp, vpp, tuple(bars), max(free))


def _needs(action: Action, stage: int, stages: int) -> tuple[str, int, int] | None:
    """The pass that has to be done before this one, or None for the first stage's forward."""
    if action.kind == "forward":
        return ("forward", stage - 1, action.microbatch) if stage else None
    if stage == stages - 1:
        return ("forward", stage, action.microbatch)
    return ("backward", stage + 1, action.microbatch)

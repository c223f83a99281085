# SPDX-License-Identifier: Apache-2.0
"""Which message goes when: the schedules of all ranks, cut into rounds that every rank knows.

In a round each rank makes the next pass of its schedule if its input has come, and at the end of the round what was
made goes to where it is needed. So both ends of a message agree on the round that it goes in, and whatever waits in a
round waits for something of the same round: nobody can wait in a circle, however strictly transfers are ordered.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .schedules import Action, ScheduleName, make_schedule


class Round(NamedTuple):
    """One rank's part: its pass, or None while its input has not come, and its later passes whose input comes now."""

    action: Action | None
    coming: tuple[Action, ...]


@lru_cache(maxsize=64)
def make_rounds(name: ScheduleName, rank: int, pp: int, vpp: int, microbatches: int) -> tuple[Round, ...]:
    """The rounds of ``rank`` in which it does something; its passes are those of :func:`make_schedule`, in order.

    Takes time and memory for all ``2 * pp * vpp * microbatches`` passes, once.
    """
    plans = [list(make_schedule(name, each, pp, vpp, microbatches)) for each in range(pp)]
    done, come = [0] * pp, [set[Action]() for _ in range(pp)]
    rounds = []
    while any(done[each] < len(plan) for each, plan in enumerate(plans)):
        coming: list[list[Action]] = [[] for _ in range(pp)]
        made: list[Action | None] = [None] * pp
        for each, plan in enumerate(plans):
            action = plan[done[each]] if done[each] < len(plan) else None
            if action is None or not (_starts_here(action, each, pp, vpp) or action in come[each]):
                continue
            made[each] = action
            done[each] += 1
            come[each].discard(action)
            if (following := _following(action, each, pp, vpp)) is not None:
                target, next_action = following
                coming[target].append(next_action)
        for each in range(pp):
            come[each].update(coming[each])
        if made[rank] or coming[rank]:
            rounds.append(Round(made[rank], tuple(coming[rank])))
    return tuple(rounds)


def _starts_here(action: Action, rank: int, pp: int, vpp: int) -> bool:
    """Whether its input is on the rank already: tokens, or the loss."""
    return action.chunk * pp + rank == (0 if action.kind == "forward" else pp * vpp - 1)


def _following(action: Action, rank: int, pp: int, vpp: int) -> tuple[int, Action] | None:
    """The pass that needs what ``action`` makes, and its rank."""
    stage = action.chunk * pp + rank + (1 if action.kind == "forward" else -1)
    if not 0 <= stage < pp * vpp:
        return None
    return stage % pp, Action(action.kind, stage // pp, action.microbatch)

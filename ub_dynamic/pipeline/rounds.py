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
    last = pp * vpp - 1
    # So many microbatches have come to each stage, in order; tokens, and the loss, are there from the start.
    come = {"forward": [microbatches] + [0] * last, "backward": [0] * last + [microbatches]}
    plans = [make_schedule(name, each, pp, vpp, microbatches) for each in range(pp)]
    following = [next(plan, None) for plan in plans]
    rounds = []
    while any(following):
        made = [
            action if action and action.microbatch < come[action.kind][action.chunk * pp + each] else None
            for each, action in enumerate(following)
        ]
        coming = []
        for each, action in enumerate(made):
            if action is None:
                continue
            following[each] = next(plans[each], None)
            stage = action.chunk * pp + each + (1 if action.kind == "forward" else -1)
            if not 0 <= stage <= last:
                continue
            come[action.kind][stage] += 1
            if stage % pp == rank:
                coming.append(Action(action.kind, stage // pp, action.microbatch))
        if made[rank] or coming:
            rounds.append(Round(made[rank], tuple(coming)))
    return tuple(rounds)

# SPDX-License-Identifier: Apache-2.0
"""Rounds of the schedules: every pass once and in order, both ends of a message in one round, nobody in a circle."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from ub_dynamic.pipeline import make_schedule
from ub_dynamic.pipeline.rounds import Round, make_rounds
from ub_dynamic.pipeline.schedules import Action

SHAPES = [(pp, vpp, count) for pp in (1, 2, 3, 4, 6) for vpp in (1, 2, 3, 4) for count in (1, 2, pp, 2 * pp + 1)]
Kernel = set[tuple[str, Any]]  # what one transfer kernel sends and receives: ("send" | "receive", message)


def name_of(vpp: int) -> Any:
    return "1f1b" if vpp == 1 else "interleaved"


def message(action: Action, rank: int, pp: int, vpp: int, made: bool) -> Any:
    """What a pass makes or needs: source, target, direction, the stage it goes to, microbatch."""
    stage, step = action.chunk * pp + rank, 1 if action.kind == "forward" else -1
    source, target = (stage, stage + step) if made else (stage - step, stage)
    inside = 0 <= source < pp * vpp and 0 <= target < pp * vpp
    return (source % pp, target % pp, action.kind, target, action.microbatch) if inside else None


def kernels_of(rounds: tuple[Round, ...], rank: int, pp: int, vpp: int) -> list[Kernel]:
    found = []
    for action, coming in rounds:
        sent = action and message(action, rank, pp, vpp, made=True)
        kernel = {("receive", message(each, rank, pp, vpp, made=False)) for each in coming}
        found.append(kernel | ({("send", sent)} if sent else set()))
    return [kernel for kernel in found if kernel]


def runs(kernels: list[list[Kernel]]) -> bool:
    """Whether all end, if the kernels of a rank run one after the other, and each until all that it sends and receives
    has its other end in a kernel that runs or has run."""
    at = [0] * len(kernels)
    moved = True
    while moved:
        moved = False
        started: Kernel = set().union(
            *(each for mine, now in zip(kernels, at, strict=True) for each in mine[: now + 1])
        )
        for rank, mine in enumerate(kernels):
            other = {"send": "receive", "receive": "send"}
            if at[rank] < len(mine) and all((other[kind], what) in started for kind, what in mine[at[rank]]):
                at[rank] += 1
                moved = True
    return all(now == len(mine) for mine, now in zip(kernels, at, strict=True))


@pytest.mark.parametrize(("pp", "vpp", "count"), SHAPES)
def test_every_pass_once_and_no_circle(pp: int, vpp: int, count: int) -> None:
    for name in (name_of(vpp), "forward"):
        rounds = [make_rounds(name, rank, pp, vpp, count) for rank in range(pp)]
        sent, received = defaultdict(list), defaultdict(list)
        for rank, mine in enumerate(rounds):
            assert [each.action for each in mine if each.action] == list(make_schedule(name, rank, pp, vpp, count))
            come: set[Action] = set()
            for action, coming in mine:
                if action and (needed := message(action, rank, pp, vpp, made=False)):
                    assert action in come, f"rank {rank} makes {action} before {needed} has come"
                come.update(coming)
            for kernel in kernels_of(mine, rank, pp, vpp):
                for kind, what in kernel:
                    (sent if kind == "send" else received)[what[:2]].append(what)
        assert sent == received  # in the same order between each two ranks, whatever their direction
        assert runs([kernels_of(mine, rank, pp, vpp) for rank, mine in enumerate(rounds)])


@pytest.mark.parametrize(("pp", "vpp", "count"), [(4, 1, 6), (2, 1, 2), (4, 2, 8)])
def test_receives_that_are_posted_ahead_would_hang(pp: int, vpp: int, count: int) -> None:
    """What the rounds are for: each transfer a kernel of its own, the receive of the next pass before this one."""
    kernels: list[list[Kernel]] = []
    for rank in range(pp):
        plan = list(make_schedule(name_of(vpp), rank, pp, vpp, count))
        mine = []
        for action, following in zip([None, *plan], [*plan, None], strict=True):
            needed = following and message(following, rank, pp, vpp, made=False)
            sent = action and message(action, rank, pp, vpp, made=True)
            mine += [{("receive", needed)}] if needed else []
            mine += [{("send", sent)}] if sent else []
        kernels.append(mine)
    assert not runs(kernels)

# SPDX-License-Identifier: Apache-2.0
"""The random operations themselves: reproducible, in the order of a pipeline schedule, through all lengths."""

from __future__ import annotations

from collections import Counter

import pytest

from ub_dynamic.testing.stress import random_operations

LENGTHS = (4, 8, 16, 64)


def draw(seed: int, in_flight: int = 3):
    return list(
        random_operations(1000, seed, LENGTHS, gathers=("a", "b"), scatters=("c",), layers=("x",), in_flight=in_flight)
    )


def test_one_seed_gives_one_sequence() -> None:
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_backwards_follow_their_forwards_in_order(in_flight: int) -> None:
    waiting = []
    deepest = 0
    for operation in draw(3, in_flight):
        if operation.kind == "forward":
            waiting.append(operation)
            deepest = max(deepest, len(waiting))
        elif operation.kind == "backward":
            forward = waiting.pop(0)
            assert (operation.microbatch, operation.tokens, operation.name) == (
                forward.microbatch,
                forward.tokens,
                forward.name,
            )
    assert not waiting
    assert deepest == in_flight


def test_collectives_run_at_the_active_shape_that_goes_up_and_down() -> None:
    active, steps = max(LENGTHS), Counter()
    for number, operation in enumerate(draw(5)):
        assert operation.number == number
        if operation.kind in ("all_gather", "reduce_scatter"):
            assert operation.tokens == active
            assert operation.name in (("a", "b") if operation.kind == "all_gather" else ("c",))
        elif operation.kind == "set_shape":
            steps[(operation.tokens > active) - (operation.tokens < active)] += 1
            active = operation.tokens
    assert min(steps[-1], steps[0], steps[1]) > 50
    assert {operation.tokens for operation in draw(5)} == set(LENGTHS)


def test_only_what_there_is() -> None:
    kinds = {operation.kind for operation in random_operations(200, 1, LENGTHS, gathers=("a",))}
    assert kinds == {"set_shape", "all_gather"}

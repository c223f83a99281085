# SPDX-License-Identifier: Apache-2.0
"""Arms in turns: their orders, the statistics of their blocks, and how the time is shared out."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from bench_fakes import Clock, Ranks

from ub_dynamic.bench.interleave import Ratio, interleaved, ratio, rounds_of, slowest, spread
from ub_dynamic.bench.report import Budget


class TestOrders:
    @pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8])
    def test_every_arm_follows_every_other_equally_often(self, count: int) -> None:
        orders = rounds_of(count)
        assert all(sorted(order) == list(range(count)) for order in orders)
        pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
        assert len(pairs) == count * (count - 1)
        assert len(set(pairs.values())) == 1

    def test_two_arms_are_abba(self) -> None:
        assert rounds_of(2) == [[0, 1], [1, 0]]
        assert rounds_of(1) == [[0]]


class TestStatistics:
    def test_a_ratio_is_a_median_with_an_interval(self) -> None:
        generator = random.Random(1)
        under = [generator.gauss(1, 0.1) for _ in range(400)]
        over = [1.02 * each * generator.gauss(1, 0.01) for each in under]
        found = ratio(over, under)
        assert found.median == pytest.approx(1.02, abs=0.002)
        assert (found.high - found.low) / 2 == pytest.approx(1.02 * 1.96 * 1.25 * 0.01 / 20, rel=0.5)
        assert ratio([1.0, 3.0], [1.0, 2.0]) == Ratio(1.25, 1.0, 1.5)

    def test_the_ends_of_an_interval_are_ratios_that_were_seen(self) -> None:
        assert ratio([0.6, 0.97, 0.97, 0.98, 0.98, 1.02], [1.0] * 6) == Ratio(pytest.approx(0.975), 0.6, 1.02)
        assert ratio([float(number) for number in range(1, 17)], [1.0] * 16) == Ratio(8.5, 4.0, 13.0)

    @pytest.mark.parametrize("count", range(6, 40))
    def test_an_interval_has_95_percent_and_a_narrower_one_less(self, count: int) -> None:
        found = ratio([float(number) for number in range(count)], [1.0] * count)
        below = int(found.low)
        assert found.high == count - 1 - below

        def covered(outside: int) -> float:
            return 1 - 2 * sum(math.comb(count, heads) for heads in range(outside + 1)) / 2**count

        assert covered(below) >= 0.95 > covered(below + 1)

    def test_spread_is_half_the_interquartile_range(self) -> None:
        assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0
        assert spread([1.0, 1.0, 1.0, 100.0]) < 20  # one outlier counts little
        assert spread([3.0]) == 0.0

    def test_the_slowest_rank_counts(self) -> None:
        assert slowest(Ranks(1.5).gather, [1.0, 2.0]) == [1.5, 3.0]

    def test_whole_sets_of_rounds_until_the_time_is_over(self) -> None:
        clock = Clock()
        seen: list[str] = []

        def model(arm: str, steps: int) -> float:
            seen.append(arm)
            return {"a": 4.0, "b": 8.0}[arm]

        taken = interleaved(("a", "b"), clock.block(model), Ranks(2.0).gather, 1.0, clock=clock)
        assert taken["a"] == [8.0] * len(taken["b"])  # the other rank takes twice as long
        sets = ["".join(seen[first : first + 4]) for first in range(2, len(seen), 4)]
        # each arm comes first equally often, in no fixed order, which could keep step with a device's clocks
        assert all({*both} == {"abba", "baab"} for both in zip(sets[::2], sets[1::2], strict=False))
        assert {*sets[::2]} == {"abba", "baab"}
        assert len(taken["a"]) == 2 * len(sets)
        # blocks are 40 ms on the slower rank, so 20 ms here, and a set has four
        assert 1.0 - 4 * 0.04 <= clock.now <= 1.0 + 1e-9

    def test_the_least_runs_even_without_time(self) -> None:
        taken = interleaved(("a", "b"), lambda arm, steps: 1.0, Ranks().gather, float("-inf"), least=3)
        assert len(taken["a"]) == 6

    def test_to_settle_a_first_set_is_not_counted(self) -> None:
        seen: list[str] = []

        def block(arm: str, steps: int) -> float:
            seen.append(arm)
            return 9.0 if len(seen) <= 6 else 1.0  # two to find the number of steps, and the first set

        taken = interleaved(("a", "b"), block, Ranks().gather, float("-inf"), least=1, settle=True)
        assert taken == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
        assert len(seen) == 10


class TestBudget:
    def test_what_one_part_leaves_the_others_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        monkeypatch.setattr("ub_dynamic.bench.report.time.monotonic", clock)
        budget = Budget(10.0, {"a": 1.0, "b": 1.0, "c": 2.0})
        assert budget.until("a") == 2.5
        clock.now = 1.0
        assert budget.until("b") == 4.0
        clock.now = 20.0
        assert budget.until("c") == 20.0
        assert budget.left < 0

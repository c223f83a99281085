# SPDX-License-Identifier: Apache-2.0
"""The rule by which a candidate replaces the default, on every rank alike: noise changes nothing."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bench_fakes import Clock, gather_one, two_ranks

from ub_dynamic.bench import race
from ub_dynamic.bench.interleave import interleaved


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """A collection between rounds looks at what the test made, not at all that pytest has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class TestTheEnd:
    """Ranks count time from where they stand, so their ends differ; what they do must not."""

    @pytest.mark.parametrize("run", [interleaved, race.race])
    def test_ranks_whose_time_is_over_apart_from_each_other_stop_together(self, run: Any) -> None:
        gathers = two_ranks()

        def rank(index: int) -> int:
            clock = Clock()
            block = clock.block(lambda arm, steps: 1.0)
            until = (0.12, 0.3)[index]
            return len(run(("a", "b"), block, gathers[index], until, block_ms=10.0, between=int, clock=clock)["a"])

        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(rank, range(2))
        assert one == other >= 3


def noisy(times: dict[str, float], sigma: float, seed: int) -> Callable[[str, int], float]:
    generator = random.Random(seed)
    return lambda arm, steps: times[arm] * generator.lognormvariate(0.0, sigma)


class TestRace:
    def run(
        self, times: dict[str, float], sigma: float, seed: int = 0, until: float = float("inf"), **options: Any
    ) -> Any:
        arms = tuple(times)
        taken = race.race(arms, noisy(times, sigma, seed), gather_one, until, between=int, **options)
        return race.pick(arms, taken), taken

    def test_a_clearly_faster_candidate_wins(self) -> None:
        (winner, reason), _ = self.run({"default": 1.0, "same": 0.99, "fast": 0.8}, 0.01)
        assert winner == "fast"
        assert reason.startswith("0.8") and "times the time of default" in reason

    def test_a_candidate_whose_interval_reaches_above_1_does_not_win(self) -> None:
        """Half the width beside the median, 0.975 + 0.21 and 0.975 + 0.015, said the contrary in both directions."""
        default = [1.0] * 6
        winner, reason = race.pick(("default", "b"), {"default": default, "b": [0.97, 0.97, 0.98, 0.98, 0.98, 1.001]})
        assert winner == "default" and reason.endswith("(b: 0.980 (0.970 to 1.001) times the time of default)")
        winner, reason = race.pick(("default", "b"), {"default": default, "b": [0.5, 0.9, 0.97, 0.98, 0.98, 0.99]})
        assert winner == "b" and reason == "0.975 (0.500 to 0.990) times the time of default, 6 rounds"

    def test_noise_alone_changes_nothing(self) -> None:
        wrong = 0
        for seed in range(60):
            (winner, reason), _ = self.run({"default": 1.0, "b": 1.0, "c": 1.0}, 0.05, seed)
            wrong += winner != "default"
            assert winner != "default" or "no candidate is surely faster" in reason
        assert wrong <= 6  # two candidates at 95 %

    def test_a_gain_below_the_spread_does_not_count(self) -> None:
        winners = [self.run({"default": 1.0, "b": 0.995}, 0.08, seed)[0][0] for seed in range(20)]
        assert winners.count("default") >= 16

    def test_the_clearly_slower_ones_drop_out_and_the_default_stays(self) -> None:
        _, taken = self.run({"default": 3.0, "fast": 1.0, "near": 1.1, "slow": 2.0}, 0.0)
        assert len(taken["slow"]) == race.FIRST_ROUNDS
        assert len(taken["default"]) == len(taken["fast"]) == len(taken["near"]) == 16

    def test_a_default_that_nobody_approaches_needs_no_more_rounds(self) -> None:
        (winner, reason), taken = self.run({"default": 1.0, "slow": 2.0}, 0.0)
        assert winner == "default" and "slower than 1.15 times the best" in reason
        assert len(taken["default"]) == race.FIRST_ROUNDS

    def test_time_bounds_the_rounds_but_never_below_what_a_decision_needs(self) -> None:
        (winner, _), taken = self.run({"default": 1.0, "b": 0.9}, 0.001, until=float("-inf"))
        assert len(taken["default"]) == race.LEAST_ROUNDS
        assert winner == "b"

    def test_what_runs_beside_takes_no_part(self) -> None:
        arms = ("default", "b")
        model = noisy({"default": 1.0, "b": 0.99, "limit": 0.1}, 0.0, 0)
        taken = race.race(arms, model, gather_one, float("inf"), beside=("limit",))
        assert len(taken["b"]) == len(taken["limit"]) == 16
        assert race.pick(arms, taken)[0] == "b"

    def test_every_rank_decides_alike_though_each_sees_other_times(self) -> None:
        arms = ("default", "b", "c", "d")
        times = dict.fromkeys(arms, 1.0) | {"d": 1.16}  # at the border of dropping out
        for seed in range(5):
            gathers = two_ranks()

            def rank(index: int, seed: int = seed, gathers: Any = gathers) -> Any:
                taken = race.race(arms, noisy(times, 0.03, 100 * seed + index), gathers[index], 0.0, between=int)
                return race.pick(arms, taken), taken

            with ThreadPoolExecutor(2) as pool:
                one, other = pool.map(rank, range(2))
            assert one == other

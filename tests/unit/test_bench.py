# SPDX-License-Identifier: Apache-2.0
"""Measuring, without a clock: orders, statistics, the rule that ignores noise, budgets, refusals, workloads."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import random
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend
from typer.testing import CliRunner

from ub_dynamic.bench import lengths, op, race, start, tp_step
from ub_dynamic.bench.arms import GUARDED, said, use_arm
from ub_dynamic.bench.benches import BENCHES
from ub_dynamic.bench.candidates import candidates, default_of
from ub_dynamic.bench.interleave import interleaved, ratio, rounds_of, slowest, spread
from ub_dynamic.bench.operations import GEMMS, buckets, check_sizes
from ub_dynamic.bench.peers import PEERS
from ub_dynamic.bench.report import Budget, Report
from ub_dynamic.bench.subject import probing, register
from ub_dynamic.bench.tuned import GrowingTable, gains
from ub_dynamic.bench.tuner import UNMEASURED, cells_of, measure
from ub_dynamic.bench.workloads import DISTRIBUTIONS, LogNormal, microbatches, read_lengths
from ub_dynamic.bench.worlds import refusal
from ub_dynamic.cli.app import app
from ub_dynamic.errors import UBShapeError, UBUnsupportedError
from ub_dynamic.manager import Manager
from ub_dynamic.modes import shares_gpu
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice, Policy
from ub_dynamic.rules import TokenRule
from ub_dynamic.tuning_table import TuningTable, these_versions, this_machine


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


class Ranks:
    """Two ranks of which this one is the first: the second's times are ``slower`` times as long."""

    def __init__(self, slower: float = 1.0) -> None:
        self.slower = slower

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, list):
            return [value, [self.slower * each for each in value]]
        return [value, value]


class Clock:
    """Time passes in blocks only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def block(self, model: Callable[[str, int], float]) -> Callable[[str, int], float]:
        def run(arm: str, steps: int) -> float:
            ms = model(arm, steps)
            self.now += steps * ms / 1000
            return ms

        return run


class TestStatistics:
    def test_a_ratio_is_a_median_with_an_interval(self) -> None:
        generator = random.Random(1)
        under = [generator.gauss(1, 0.1) for _ in range(400)]
        over = [1.02 * each * generator.gauss(1, 0.01) for each in under]
        median, interval = ratio(over, under)
        assert median == pytest.approx(1.02, abs=0.002)
        assert interval == pytest.approx(1.02 * 1.96 * 1.25 * 0.01 / 20, rel=0.5)
        assert ratio([1.0, 3.0], [1.0, 2.0]) == (1.25, 0.25)

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
        assert "".join(seen[2:6]) == "abba"
        assert len(taken["a"]) % 2 == 0
        # blocks are 40 ms on the slower rank, so 20 ms here, and a set has four
        assert 1.0 - 4 * 0.04 <= clock.now <= 1.0 + 1e-9

    def test_the_least_runs_even_without_time(self) -> None:
        taken = interleaved(("a", "b"), lambda arm, steps: 1.0, Ranks().gather, float("-inf"), least=3)
        assert len(taken["a"]) == 6


def two_ranks() -> list[Callable[[Any], list[Any]]]:
    """``gather`` of each of two ranks, which are threads."""
    told: list[Any] = [None, None]
    meet = threading.Barrier(2, timeout=30)

    def gather(index: int, value: Any) -> list[Any]:
        told[index] = value
        meet.wait()
        found = list(told)
        meet.wait()
        return found

    return [functools.partial(gather, index) for index in range(2)]


def test_an_arm_with_a_policy_stands_at_its_plan_after_one_without() -> None:
    ring = OverlapConfig("ring_exchange")
    policy = Policy((1,), ({"fc2_fprop": Choice(ring, "one stage for every T")},))
    backend = FakeBackend()
    manager = Manager(backend, (128, 64), check="never", policy=policy)
    for _ in range(2):
        for arm in ("dynamic", "pad", "unguarded", "auto"):
            use_arm(manager, arm, policy)
            assert backend.calls[-1] == {} and backend.followed[-1] is False and manager.policy is None
            assert manager.auto is (arm == "auto") and (backend.on_operand is not None) is (arm in GUARDED)
        use_arm(manager, "policy", policy)
        assert backend.calls[-1] == {"fc2_fprop": ring} and backend.followed[-1] is True
        assert not manager.auto and backend.on_operand is not None


def test_a_row_says_what_a_policy_chose_for_its_layers() -> None:
    ring = OverlapConfig("ring_exchange")
    bulk = Choice(OverlapConfig("bulk"), "")
    choices = {"fc2_fprop": Choice(ring, ""), "fc1_dgrad": bulk, "qkv_fprop": Choice(ring, "")}
    assert said(choices, ("fc1", "fc2")) == {"policy": "fc2_fprop ring_exchange, fc1_dgrad bulk"}
    assert said({}, ("fc1",), ("a", "b")) == {"policy": "as configured", "policy_otherwise": "a; b"}


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


def gather_one(value: Any) -> list[Any]:
    return [value]


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

    def test_noise_alone_changes_nothing(self) -> None:
        wrong = 0
        for seed in range(60):
            (winner, reason), _ = self.run({"default": 1.0, "b": 1.0, "c": 1.0}, 0.05, seed)
            wrong += winner != "default"
            assert winner != "default" or "faster by more than the spread" in reason
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


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """A collection between rounds looks at what the test made, not at all that pytest has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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


class TestSizes:
    def test_the_sizes_of_one_rank(self) -> None:
        assert GEMMS["fc1_dgrad"].local_features(8, 24, 2) == (8, 12)
        assert GEMMS["fc2_fprop"].local_features(8, 24, 2) == (12, 8)
        assert GEMMS["qkv_fprop"].local_rows(64, 4) == (16, 64)
        assert GEMMS["proj_dgrad"].local_rows(64, 4) == (64, 16)

    def test_buckets_are_powers_of_two_and_both_ends(self) -> None:
        assert buckets(512, 16384, 2) == (512, 1024, 2048, 4096, 8192, 16384)
        assert buckets(600, 3000, 4) == (600, 1024, 2048, 3000)
        assert buckets(10, 100, 32) == (32, 64, 96)
        with pytest.raises(UBShapeError, match="at most the last"):
            buckets(512, 256, 2)
        with pytest.raises(UBShapeError, match="the next is 64"):
            buckets(1, 32, 64)

    def test_sizes_that_cannot_be_cut(self) -> None:
        with pytest.raises(UBShapeError, match=r"ffn = 30 .*the next valid value is 32"):
            check_sizes(64, 30, 4)

    def test_the_most_arithmetic_first(self) -> None:
        cells = cells_of(list(GEMMS), (512, 1024), 64, 256, 2)
        assert (cells[0].gemm.name, cells[0].tokens) == ("fc1_dgrad", 1024)
        work = [cell.gemm.flops(cell.tokens, 64, 256, 2) for cell in cells]
        assert work == sorted(work, reverse=True)


class TestCandidates:
    def test_every_setting_of_a_pipeline_on_gpus_and_what_has_an_effect_on_the_host(self) -> None:
        gemm = GEMMS["fc2_fprop"]
        assert len([c for c in candidates(gemm, 2, 4096, "te") if c.method == "pipeline"]) == 16
        host = [str(c) for c in candidates(gemm, 2, 64, "host")]
        assert host == ["none", "ring_exchange", "pipeline num_splits=2", "pipeline num_splits=4"]
        assert "pipeline num_splits=4" not in [str(c) for c in candidates(gemm, 2, 16, "host")]

    def test_a_pipelined_dgrad_is_no_candidate(self) -> None:
        for backend in ("host", "te"):
            methods = {c.method for c in candidates(GEMMS["qkv_dgrad"], 2, 64, backend)}
            assert methods == {"none", "bulk", "ring_exchange"}

    @pytest.mark.parametrize("backend", ["host", "te"])
    @pytest.mark.parametrize("gemm", GEMMS)
    def test_the_default_is_among_the_candidates(self, gemm: str, backend: str) -> None:
        assert default_of(gemm, None, backend) in candidates(GEMMS[gemm], 2, 4096, backend)

    def test_the_default_follows_the_configuration(self) -> None:
        cfgs = {"fc2_fprop": {"num_sm": 4}, "qkv_dgrad": {"method": "ring_exchange"}}
        assert default_of("fc2_fprop", cfgs, "te") == OverlapConfig("pipeline", 4, 4, first_gemm=False)
        assert default_of("qkv_dgrad", cfgs, "te") == OverlapConfig("ring_exchange")

    def test_probing_leaves_every_t_as_configured(self) -> None:
        policy = probing({"fc2_fprop": candidates(GEMMS["fc2_fprop"], 2, 64, "te")})
        assert policy.choices(1) == policy.choices(2**30) == {}
        assert len(policy.configurations()["fc2_fprop"]) == 18


class FakeWorld:
    """One rank without communication: each configuration takes the time that ``cost`` says."""

    backend = "host"
    mode = "cpu-mpi"
    rank, size, dtype, cfgs = 0, 2, torch.float32, None

    def __init__(self, cost: Callable[[str, int], float], refuses: tuple[str, ...] = ()) -> None:
        self.cost, self.refuses = cost, refuses
        self.standing = "default"
        self.manager: Any = None
        self.initialised = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def meet(self) -> None:
        return

    def initialize(self, capacity: int, hidden: int, policy: Any = None, **options: Any) -> Any:
        for configs in policy.configurations().values():
            for config in configs:
                if config.method in self.refuses:
                    raise UBUnsupportedError(f"no {config.method} here")
        self.initialised += 1
        return FakeManager(self, (capacity, hidden))

    def destroy(self) -> None:
        self.initialised -= 1

    def linear(self, name: str, before: int, after: int, mode: str) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def plain_linear(self, before: int, after: int) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def random(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return torch.zeros(1).expand(shape)

    def timed(self, step: Any, steps: int, before: Any = None) -> float:
        return self.cost(self.standing, steps)


class FakeManager:
    def __init__(self, world: FakeWorld, capacity: tuple[int, int]) -> None:
        self.capacity, self.backend = capacity, self
        self._world, self._rule = world, TokenRule(2, 2, capacity[0])

    def plan(self, choices: Any) -> str:
        return next((str(config) for config in choices.values()), "default")

    def switch(self, plan: str) -> None:
        self._world.standing = plan

    def max_tokens(self) -> int:
        return self._rule.maximum

    def token_multiple(self) -> int:
        return self._rule.multiple

    def set_active_shape(self, shape: Any) -> None:
        return


def tune(world: FakeWorld, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    events: list[Any] = []
    chosen = {"hidden": 64, "ffn": 256, "first": 64, "last": 256, "gemms": ["fc2_fprop"], "seconds": 5, "done": []}
    measure(world, {**chosen, **options}, Report(events.append))  # type: ignore[arg-type]
    rows = [event["row"] for event in events if "row" in event]
    return rows, [event["refused"] for event in events if "refused" in event]


class TestTuner:
    def test_the_fastest_wins_and_the_reason_is_said(self) -> None:
        world = FakeWorld(lambda plan, steps: {"default": 2.0, "none": 1.0}.get(plan, 1.9))
        rows, _ = tune(world)
        assert [row["tokens"] for row in rows] == [256, 128, 64]
        assert {row["chosen"]["method"] for row in rows} == {"none"}
        assert "0.500 +- 0.000 times the time of pipeline num_splits=4" in rows[0]["reason"]
        first = rows[0]["candidates"][0]
        assert first == {"config": {"method": "pipeline", "num_splits": 4}, "median_us": 2000.0, "spread_us": 0.0}
        assert world.initialised == 0

    def test_what_was_measured_is_not_measured_again(self) -> None:
        rows, _ = tune(FakeWorld(lambda plan, steps: 1.0), done=[["fc2_fprop", 256], ["fc2_fprop", 64]])
        assert [row["tokens"] for row in rows] == [128]

    def test_without_time_the_default_stays_and_says_so(self) -> None:
        rows, _ = tune(FakeWorld(lambda plan, steps: 1.0), seconds=0)
        assert {row["reason"] for row in rows} == {UNMEASURED}
        assert rows[0]["chosen"] == {"method": "pipeline", "num_splits": 4} and rows[0]["candidates"] == []

    def test_a_configuration_that_is_refused_is_left_out_with_its_reason(self) -> None:
        world = FakeWorld(lambda plan, steps: 1.0, refuses=("ring_exchange",))
        rows, refused = tune(world)
        assert refused == ["fc2_fprop, ring_exchange: no ring_exchange here"]
        assert "ring_exchange" not in {each["config"]["method"] for each in rows[0]["candidates"]}
        assert world.initialised == 0

    def test_an_error_that_is_not_about_a_candidate_is_raised(self) -> None:
        with pytest.raises(UBUnsupportedError):
            register(Broken(lambda plan, steps: 1.0), 256, 64, {"fc2_fprop": ()})  # type: ignore[arg-type]

    def test_plain_collectives_are_not_measured_where_ranks_share_a_gpu(self) -> None:
        world = FakeWorld(lambda plan, steps: 1.0)
        world.mode = "one-gpu-2-ranks"
        rows, refused = tune(world)
        assert len(refused) == 1 and refused[0].startswith("none: ranks that share one GPU")
        assert "none" not in {each["config"]["method"] for each in rows[0]["candidates"]}


class Broken(FakeWorld):
    def initialize(self, capacity: int, hidden: int, policy: Any = None, **options: Any) -> Any:
        raise UBUnsupportedError("nothing works")


def facts(**other: Any) -> dict[str, Any]:
    where = {"machine": this_machine(), "versions": these_versions(), "tp": 2, "hidden": 64, "ffn": 256}
    return {**where, "dtype": "float32", "mode": "cpu-mpi", "date": "today", "command": "tune", **other}


def row(tokens: int, measured: bool = True) -> dict[str, Any]:
    configs = [{"method": "pipeline", "num_splits": 4}, {"method": "none"}]
    found = [{"config": c, "median_us": 10.0 - i, "spread_us": 0.1} for i, c in enumerate(configs)]
    chosen = configs[1] if measured else configs[0]
    candidates = found if measured else []
    return {"gemm": "fc2_fprop", "tokens": tokens, "chosen": chosen, "reason": "so", "candidates": candidates}


class TestGrowingTable:
    def test_every_row_is_saved_and_taken_up_again(self, tmp_path: Path) -> None:
        path = tmp_path / "table.json"
        growing = GrowingTable(path, facts())
        growing.take(row(128))
        growing.take(row(64, measured=False))
        again = GrowingTable(path, facts(date="tomorrow", command="another"))
        assert again.done == [("fc2_fprop", 128)]  # the other one still wants to be measured
        again.take(row(64))
        table = TuningTable.load(path)
        assert [(each.tokens, str(each.chosen)) for each in table.rows] == [(64, "none"), (128, "none")]
        assert table.date == "tomorrow"
        assert gains(table.rows) == {
            "cells": 2,
            "measured": 2,
            "changed": 2,
            "over_default_min": 0.9,
            "over_default_mean": 0.9,
        }

    def test_a_table_of_another_place_is_not_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "table.json"
        GrowingTable(path, facts()).take(row(128))
        with pytest.raises(UBUnsupportedError, match="hidden is 64, here 128.*--restart"):
            GrowingTable(path, facts(hidden=128))
        assert GrowingTable(path, facts(hidden=128), restart=True).done == []
        path.write_text("{}")
        with pytest.raises(UBUnsupportedError):
            GrowingTable(path, facts())

    def test_curves_are_drawn(self, tmp_path: Path) -> None:
        from ub_dynamic.bench.curves import draw

        growing = GrowingTable(tmp_path / "table.json", facts())
        growing.take({**row(128), "gemm_us": 5.0})
        growing.take(row(64, measured=False))
        draw(growing.table, tmp_path / "curves.svg")
        assert "fc2_fprop" in (tmp_path / "curves.svg").read_text()


class TestRefusals:
    def test_a_shared_gpu_cannot_time_what_needs_one_each(self) -> None:
        assert shares_gpu("one-gpu-2-ranks") and not shares_gpu("2-gpus") and not shares_gpu("cpu-mpi")
        for arm in ("none", "async_tp", "cublasmp"):
            assert "share one GPU" in (refusal("one-gpu-4-ranks", arm) or "")
            assert refusal("4-gpus", arm) is None
        assert refusal("one-gpu-4-ranks", "exact") is None

    def test_peers_say_why_they_are_not_there(self) -> None:
        host = FakeWorld(lambda plan, steps: 1.0)
        gemm = GEMMS["fc1_fprop"]
        reasons = {name: peer.available(host, gemm) for name, peer in PEERS.items()}  # type: ignore[arg-type]
        assert {name for name, reason in reasons.items() if reason is None} == {"default", "none", "plain"}
        assert "CUDA" in str(reasons["async_tp"])

    def test_arms_that_cannot_be_compared_are_left_out(self) -> None:
        world = FakeWorld(lambda plan, steps: 1.0)
        world.mode = "one-gpu-2-ranks"
        events: list[Any] = []
        report = Report(events.append)
        arms = tp_step.supported(world, tp_step.ARMS, None, report)  # type: ignore[arg-type]
        assert arms == ("dynamic", "exact", "pad", "rebuild")
        assert len(events) == 2 and "policy: there is no table" in events[1]["refused"]

    def test_modes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert start.mode_of("te", 2) == "2-gpus"
        assert start.mode_of("te", 4) == "one-gpu-4-ranks"
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(UBUnsupportedError, match="--backend host needs none"):
            start.mode_of("te", 2)
        with pytest.raises(UBUnsupportedError, match="at least 2"):
            start.mode_of("host", 1)


class TestWorkloads:
    def test_published_statistics_are_reproduced(self) -> None:
        drawn = {name: found.draw(40_000, 1) for name, found in DISTRIBUTIONS.items()}
        assert statistics.fmean(drawn["openwebtext"]) == pytest.approx(1128, rel=0.05)
        assert statistics.fmean(drawn["stackexchange"]) == pytest.approx(553, rel=0.05)
        assert statistics.fmean(drawn["arxiv"]) == pytest.approx(11_932, rel=0.05)
        inside = [8192 <= length <= 65536 for length in drawn["longalign"]]
        assert statistics.fmean(inside) == pytest.approx(0.98, abs=0.005)

    def test_every_rank_draws_the_same(self) -> None:
        assert LogNormal(100, 1).draw(50, 3) == LogNormal(100, 1).draw(50, 3) != LogNormal(100, 1).draw(50, 4)

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "lengths"
        path.write_text("12\n\n 7 \n")
        assert read_lengths(path) == [12, 7]
        path.write_text("12\nx\n")
        with pytest.raises(UBShapeError, match=r"lengths:2: 'x'"):
            read_lengths(path)
        path.write_text("")
        with pytest.raises(UBShapeError, match="no length"):
            read_lengths(path)

    def test_microbatches_fit_and_are_valid(self) -> None:
        lengths = DISTRIBUTIONS["stackexchange"].draw(200, 0)
        for documents in (None, 3):
            found = microbatches(lengths, 2048, 2, multiple=64, documents=documents)
            assert all(0 < tokens <= 2048 and tokens % 64 == 0 for tokens in found)
        assert len(microbatches(lengths, 2048, 2, documents=3)) == -(-200 // 3)


class TestFigures:
    def test_op(self) -> None:
        cell = {"gemm": "fc2_fprop", "policy_over_plain": 1.1, "none_over_plain": 1.2}
        rows = [
            {**cell, "tokens": 1024, "over_best_peer": 1.01},
            {**cell, "tokens": 4096, "over_best_peer": 0.9},
            {**cell, "tokens": 8192, "over_best_peer": 0.4},
        ]
        made = op.figures(rows)
        assert made["over_best_peer_max"] == 1.01
        assert made["over_best_peer_geomean_t4096"] == pytest.approx(0.6)
        assert made["none_over_plain_geomean"] == pytest.approx(1.2)

    def test_lengths(self) -> None:
        rows = [{"time_over_token_ratio": 1.02}, {"time_over_token_ratio": 0.98, "policy_over_none": 0.7}]
        assert lengths.figures(rows) == {"time_over_token_ratio_max": 1.02, "policy_over_none_max": 0.7}


def command(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


class TestCommands:
    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["bench", "op", "--backend", "mpi"], "neither host nor te"),
            (["bench", "op", "--gemms", "fc3"], "'fc3' is not one of fc1_fprop"),
            (["bench", "op", "--tokens", "a:b"], "not FIRST:LAST"),
            (["bench", "op", "--json", "Result.json"], "lower-case letters"),
            (["bench", "tp-step", "--capacity", "128", "--tokens", "256"], "above the capacity of 128"),
            (["bench", "lengths", "--distributions", "zipf"], "not one of openwebtext"),
            (["tune", "--hidden", "64", "--ffn", "31", "--out", "t.json"], "ffn = 31 must be a positive multiple"),
        ],
    )
    def test_bad_input_starts_nothing(self, words: list[str], says: str) -> None:
        result = command(*words)
        assert result.exit_code == 2
        assert says in " ".join(result.output.replace("│", " ").split())

    def test_without_a_gpu_graphs_say_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        result = command("bench", "graphs")
        assert result.exit_code == 2 and "torch sees none" in result.output

    def test_every_bench_has_a_command(self) -> None:
        result = command("bench", "--help")
        assert all(name in result.output for name in BENCHES if name != "tune")


def test_events_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("")
    seen: list[Any] = []
    with start._Reader(path, seen.append) as reader, path.open("a") as file:
        file.write(json.dumps({"row": {"a": 1}}) + "\n" + '{"row": ')
        file.flush()
        file.write('{"a": 2}}\n{"ended in the mid')
    assert seen == [{"row": {"a": 1}}, {"row": {"a": 2}}] == reader.events

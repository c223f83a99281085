# SPDX-License-Identifier: Apache-2.0
"""The tuner: cells, candidates, what a cell says, and the table that grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_fakes import FakeWorld

from ub_dynamic.bench.candidates import candidates, default_of
from ub_dynamic.bench.operations import GEMMS, buckets, check_sizes
from ub_dynamic.bench.report import Report
from ub_dynamic.bench.subject import probing, register
from ub_dynamic.bench.tuned import GrowingTable, gains
from ub_dynamic.bench.tuner import UNMEASURED, cells_of, measure
from ub_dynamic.errors import UBShapeError, UBUnsupportedError
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.tuning_table import TuningTable, these_versions, this_machine


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


def tune(world: FakeWorld, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    events: list[Any] = []
    chosen = {"hidden": 64, "ffn": 256, "tokens": [64, 128, 256], "gemms": ["fc2_fprop"], "seconds": 60, "done": []}
    measure(world, {**chosen, **options}, Report(events.append))  # type: ignore[arg-type]
    rows = [event["row"] for event in events if "row" in event]
    return rows, [event["refused"] for event in events if "refused" in event]


class TestTuner:
    def test_the_fastest_wins_and_the_reason_is_said(self) -> None:
        world = FakeWorld(lambda plan, steps: {"default": 2.0, "none": 1.0}.get(plan, 1.9))
        rows, _ = tune(world)
        assert [row["tokens"] for row in rows] == [256, 128, 64]
        assert {row["chosen"]["method"] for row in rows} == {"none"}
        assert "0.500 (0.500 to 0.500) times the time of pipeline num_splits=4" in rows[0]["reason"]
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
        with GrowingTable(path, facts()) as growing:
            growing.take(row(128))
            growing.take(row(64, measured=False))
        with GrowingTable(path, facts(date="tomorrow", command="another")) as again:
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
        with GrowingTable(path, facts()) as growing:
            growing.take(row(128))
        with pytest.raises(UBUnsupportedError, match="hidden is 64, here 128.*--restart"):
            GrowingTable(path, facts(hidden=128))
        with GrowingTable(path, facts(hidden=128), restart=True) as anew:
            assert anew.done == []
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

# SPDX-License-Identifier: Apache-2.0
"""The plan of the measurements of context parallelism and pipelines on several GPUs, and the figures they make."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# What the programs set for their ranks when they are loaded.
SET = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_TORCH_COMPILE",
    "TORCHINDUCTOR_COMPILE_THREADS",
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for variable in SET:
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def load(name: str) -> Any:
    return importlib.import_module(name)


def test_dry_run_names_every_part_in_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("several_gpus_cp").main(["--gpus", "4", "--dry-run"]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [f"{n}_x4" for n in ("cp_te", "cp_hierarchical", "attnres")]
    assert all("--gpus" in line for line in lines) and total.startswith("command 1")


def test_what_is_there_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cp_te", "cp_hierarchical", "attnres"):
        (tmp_path / f"{name}_x2.json").write_text(json.dumps({"rows": [{}] * 6}))
    assert load("several_gpus_cp").main(["--gpus", "2", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("is there already") == 3


def test_figures_of_the_step_are_the_worst_of_all_cases() -> None:
    arms = ("resolver", "patches", "both")
    rows = [{f"{arm}_over_stock": value for arm in arms} | {"both_host_waits": 0} for value in (0.9, 1.02)]
    made = load("cp_step").figures(rows)
    assert made["both_over_stock_max"] == 1.02
    assert made["resolver_over_stock_median"] == pytest.approx(0.96)


def test_figures_of_the_ways_judge_the_chooser_and_ours_against_te() -> None:
    way = {"what": "way", "rel_error": 0.0, "outside": 0.0}
    rows = [
        {"what": "links"},
        {**way, "comm_type": "a2a+p2p", "over_best": 1.0, "chosen": False, "over_te": 0.97},
        {**way, "comm_type": "a2a+p2p", "over_best": 1.03, "chosen": True},
        {**way, "comm_type": "p2p", "over_best": 1.5, "chosen": False, "over_te": 1.01},
    ]
    made = load("cp_comm").figures(rows)
    assert made["chosen_over_best_max"] == 1.03
    assert made["a2a_p2p_over_te_max"] == 0.97
    assert made["p2p_over_te_max"] == 1.01


def test_without_times_the_rest_makes_figures() -> None:
    assert load("cp_step").figures([{"both_host_waits": 1}]) == {"comparisons": 1, "both_host_waits": 1}
    way = {"what": "way", "comm_type": "p2p", "rel_error": 0.1, "outside": 2.0}
    assert load("cp_comm").figures([{"what": "links"}, way]) == {
        "comparisons": 1, "rel_error_max": 0.1, "outside_tolerance": 2.0,
    }  # fmt: skip
    row = {"vpp": 2, **{f"{arm}_{what}_bytes": 5 for arm in ("plain", "cached") for what in ("wire", "peak")}}
    assert load("attnres_step").figures([row]) == {
        "depths": 1, "plain_wire_bytes_vpp2": 5, "cached_wire_bytes_vpp2": 5, "plain_peak_bytes_vpp2": 5,
        "cached_peak_bytes_vpp2": 5,
    }  # fmt: skip


def test_ways_are_compared_in_real_tokens_of_all_ranks() -> None:
    program, common = load("cp_comm"), load("_cp")
    problem = common.Problem.make((8, 3), 1, 0, torch.device("cpu"), 4, 2)
    assert len(problem.q) == 11
    problem = common.Problem.make((13, 3), 2, 0, torch.device("cpu"), 4, 2)
    assert len(problem.padding) > 0

    def way(padding: float, token: float) -> Any:
        tensors = [torch.ones_like(x) for x in (problem.dout, problem.q, problem.k, problem.v)]
        for tensor in tensors:
            tensor.data[problem.padding] = padding
            tensor.data[problem.real[0]] += token
        return lambda: tensors

    ways = {"first": way(0.0, 0.0), "other padding": way(float("nan"), 0.0), "wrong": way(0.0, 2.0)}
    # The other rank's are as wrong again.
    made = program.against_the_first(problem, ways, lambda mine: [mine, (2 * mine[0], mine[1])])
    for name in ("first", "other padding"):
        assert made[name] == {"rel_error": 0.0, "outside": 0.0}
    elements = common.HEAD_SIZE * (4 + 4 + 2 + 2)
    assert made["wrong"]["outside"] == 2 * elements and made["wrong"]["rel_error"] > 0.5


def test_the_memory_of_a_way_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("attnres_step")
    device = {"now": 1000, "peak": 1000}
    ended: list[str] = []

    def take(count: int) -> None:
        device["now"] += count
        device["peak"] = max(device.values())

    size = {"plain": 700, "cached": 300}

    class Pipeline:
        def __init__(self, arm: str) -> None:
            self.arm, self.transport, self.runner = arm, arm, self
            take(50)

        def step(self, batches: Any) -> Any:
            first = () if ended else (400,)  # what a library takes once, and keeps
            for count in (*first, size[self.arm], -size[self.arm]):
                take(count)
            return SimpleNamespace(memory=SimpleNamespace(store_peak_bytes=7))

        def close(self) -> None:
            take(-50)
            ended.append(self.arm)

    for name, function in (
        ("memory_allocated", lambda: device["now"]),
        ("max_memory_allocated", lambda: device["peak"]),
        ("reset_peak_memory_stats", lambda: device.update(peak=device["now"])),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    wire = SimpleNamespace(tensor_bytes={("forward", 0): 5}, blocks={("forward", 0): 1})
    monkeypatch.setattr(module, "on_the_wire", lambda transport, result: wire)
    found = module.in_turns(Pipeline, [], lambda value: [value, value])
    assert ended == ["plain", "cached"] * 2
    assert {arm: told["peak_bytes"] for arm, told in found.items()} == {"plain": 750, "cached": 350}
    assert found["plain"]["wire_bytes"] == 5 and found["plain"]["store_peak_bytes"] == 7


@pytest.mark.parametrize(("ranks", "kept"), [(None, {"ms": 1.0}), (2, {})])
def test_times_between_ranks_that_share_a_gpu_are_left_out_and_said(
    ranks: int | None, kept: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, te_world = load("_one_gpu"), importlib.import_module("ub_dynamic.testing.te_world")
    monkeypatch.setattr(program, "active_ranks", lambda: ranks)
    own: list[Any] = []
    monkeypatch.setattr(te_world, "keep_to_own_processors", own.append)
    world = SimpleNamespace(rank=0, size=2)
    timing = program.timing_world(world)
    assert own == [world], "timings need processors of their own"
    assert timing.mode == ("2-gpus" if ranks is None else "one-gpu-2-ranks")
    assert program.times(timing, {"ms": 1.0}) == kept
    assert ("left out: times" in capsys.readouterr().out) is (ranks is not None)


@pytest.mark.parametrize("name", ["cp_step", "cp_comm", "attnres_step"])
def test_streams_have_queues_of_their_own_and_the_result_says_so(name: str) -> None:
    load(name)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert load("_one_gpu").connections() == {"cuda_device_max_connections": 8}
    if name != "attnres_step":
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "1"


def test_one_rank_a_gpu_is_refused_where_there_are_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load("_one_gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(program, "start", lambda *_, **__: pytest.fail("started"))
    options = program.parser("A program.").parse_args(["--tp", "2", "--gpus", "--out", str(tmp_path)])
    assert program.main("program", options, lambda *_: None, lambda rows: {}) == 2
    assert "torch sees 1 GPU(s) here, and 2 ranks need one each" in capsys.readouterr().err


def test_the_pipeline_has_as_many_blocks_as_wanted() -> None:
    module = load("attnres_step")
    for pp, vpp in ((2, 2), (4, 2), (4, 4)):
        case = module.case_of(pp, vpp, 8)
        commits = sum(index % case.block == 0 for index in range(sum(case.sublayers)))
        assert commits in (min(8, sum(case.sublayers)), 7), (pp, vpp)
        assert case.tokens == list(module.TOKENS)

# SPDX-License-Identifier: Apache-2.0
"""The plan of the measurements of context parallelism and pipelines on several GPUs, and the figures they make."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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


def test_the_pipeline_has_as_many_blocks_as_wanted() -> None:
    module = load("attnres_step")
    for pp, vpp in ((2, 2), (4, 2), (4, 4)):
        case = module.case_of(pp, vpp, 8)
        commits = sum(index % case.block == 0 for index in range(sum(case.sublayers)))
        assert commits in (min(8, sum(case.sublayers)), 7), (pp, vpp)
        assert case.tokens == list(module.TOKENS)

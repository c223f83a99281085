# SPDX-License-Identifier: Apache-2.0
"""The plan of the measurements of context parallelism and pipelines on several GPUs, and the figures they make."""

from __future__ import annotations

import importlib
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(("flags", "suffix"), [(["--gpus", "4"], "x4"), (["--shared", "--gpus", "2"], "shared2")])
def test_dry_run_names_every_part(capsys: pytest.CaptureFixture[str], flags: list[str], suffix: str) -> None:
    assert load("several_gpus_cp").main([*flags, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"{n}_{suffix}" for n in ("cp_te", "cp_hierarchical", "attnres")]
    assert all(("--gpus" in line) == suffix.startswith("x") for line in lines)


def test_what_is_there_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cp_te", "cp_hierarchical", "attnres"):
        (tmp_path / f"{name}_x2.json").write_text("{}")
    assert load("several_gpus_cp").main(["--gpus", "2", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("is there already") == 3


def test_a_part_that_failed_is_run_again_and_everything_is_packed(tmp_path: Path) -> None:
    module = load("several_gpus")
    result = tmp_path / "ops_x2.json"
    assert not module.is_done(result)
    result.write_text('{"figures": {"failed_starts": 1}}')
    assert not module.is_done(result)
    result.write_text('{"figures": {"cells": 3}}')
    assert module.is_done(result)
    archive = tmp_path.parent / f"{tmp_path.name}.tar.gz"
    module.pack(archive, tmp_path, tmp_path)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == [tmp_path.name, f"{tmp_path.name}/ops_x2.json"]
    archive.unlink()


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

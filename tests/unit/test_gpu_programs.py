# SPDX-License-Identifier: Apache-2.0
"""The parts of the GPU programs that need no GPU: which T are tried, what figures say, how the driver ends parts."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ub_dynamic.testing.te_bits import random_lengths, sweeps
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, differing, outside_tolerance

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("_one_gpu", "packed", "packed.data"):
        sys.modules.pop(name, None)


class TestLengths:
    @pytest.mark.parametrize("multiple", [2, 4, 32])
    def test_multiples_from_the_smallest_to_capacity_that_rise_and_fall(self, multiple: int) -> None:
        lengths = random_lengths(40, multiple, 2048, 1)
        assert len(lengths) == 40
        assert all(0 < tokens <= 2048 and tokens % multiple == 0 for tokens in lengths)
        assert {multiple, 2048, 2048 - multiple} <= set(lengths)
        steps = [b - a for a, b in itertools.pairwise(lengths)]
        assert sum(step > 0 for step in steps) > 10
        assert sum(step < 0 for step in steps) > 10

    def test_the_same_seed_gives_the_same_on_every_rank(self) -> None:
        assert random_lengths(40, 2, 2048, 5) == random_lengths(40, 2, 2048, 5)
        assert random_lengths(40, 2, 2048, 5) != random_lengths(40, 2, 2048, 6)

    def test_sweeps_cover_every_kind_method_and_recipe(self) -> None:
        found = sweeps(4, 12, 512, 1024)
        assert {kind for sweep in found for kind in sweep.kinds} == set(KINDS)
        assert {sweep.overlap for sweep in found} == set(OVERLAPS)
        assert {recipe for sweep in found for recipe in sweep.recipes} == {"bf16", "delayed", "current"}
        fp8 = [tokens for sweep in found if sweep.mode == "fp8" for tokens in sweep.lengths]
        assert all(tokens % (16 * 4) == 0 for tokens in fp8)


class TestComparison:
    def test_nan_is_a_difference_even_where_both_have_it(self) -> None:
        poisoned = {"output": torch.tensor([1.0, float("nan")])}
        assert differing(poisoned, poisoned)

    def test_a_missing_tensor_and_another_shape_are_differences(self) -> None:
        one = {"output": torch.ones(4), "input.grad": torch.ones(2)}
        assert set(differing(one, {"output": torch.ones(2, 2)})) == {"output", "input.grad"}
        assert differing(one, dict(one)) == {}

    def test_te_tolerance_needs_both_bounds_to_be_passed(self) -> None:
        expected = torch.tensor([100.0, 1.0])
        assert not outside_tolerance(torch.tensor([101.0, 1.0]), expected, fp8=False)  # 1 %
        assert outside_tolerance(torch.tensor([100.0, 1.5]), expected, fp8=False)
        assert not outside_tolerance(torch.tensor([100.0, 1.001]), expected, fp8=False)  # 0.001
        assert outside_tolerance(torch.tensor([float("nan"), 1.0]), expected, fp8=True)


class TestFigures:
    def test_step(self) -> None:
        step = {"kind": "step", "active_over_exact": 1.004, "active_over_exact_paired": 1.002}
        rows: list[dict[str, Any]] = [
            {"tp": 2, **step, "active_over_pad_excess": 0.01},
            {
                "tp": 2,
                **step,
                "active_over_pad_excess": -0.01,
                "guard_cost_fraction": 0.002,
                "auto_cost_fraction": 0.003,
            },
            {"tp": 2, "kind": "lengths", "time_over_token_ratio": 1.01},
        ]
        assert load("te_step").figures(rows) == {
            "active_over_exact_max": 1.004,
            "active_over_exact_paired_max": 1.002,
            "active_over_pad_excess_max": 0.01,
            "guard_cost_fraction": 0.002,
            "auto_cost_fraction": 0.003,
            "lengths_time_over_token_ratio": 1.01,
        }

    def test_real_lengths_fill_the_capacity(self) -> None:
        lengths = load("te_step").real_lengths(24, 4, 16384)
        assert len(lengths) == 24
        assert max(lengths) == 16384
        assert all(tokens % 4 == 0 for tokens in lengths)
        assert len(set(lengths)) > 15

    def test_memcheck_reads_every_summary(self) -> None:
        program = load("te_memcheck")
        text = b"========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 12 errors\n"
        assert [int(count) for count in program._SUMMARY.findall(text)] == [0, 12]


class TestDriver:
    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        driver = load("run_te_gpu")
        good = "import json, sys; json.dump({'figures': {'cases': 3}}, open(sys.argv[2] + '/good.json', 'w'))"
        parts = (
            driver.Part("bad", ("-c", "print('what went wrong'); raise SystemExit(3)"), 30),
            driver.Part("slow", ("-c", "import time; time.sleep(60)"), 1.0),
            driver.Part("good", ("-c", good), 30, "good"),
        )
        monkeypatch.setattr(driver, "PARTS", parts)
        return driver

    def test_a_part_that_fails_or_hangs_does_not_stop_the_others(
        self, driver: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        archive = tmp_path / "all.tar.gz"
        out = tmp_path / "out"
        assert driver.main(["--out", str(out), "--archive", str(archive)]) == 1
        said = capfd.readouterr().out
        assert "what went wrong" in said
        assert [line.split()[:2] for line in said.splitlines()[-3:]] == [["bad", "3"], ["slow", "124"], ["good", "0"]]
        assert said.splitlines()[-1].endswith("cases 3")
        assert json.loads((out / "good.json").read_text()) == {"figures": {"cases": 3}}
        with tarfile.open(archive) as tar:
            assert {Path(name).name for name in tar.getnames()} == {"out", "good.json", "run_te_gpu.log"}

    def test_parts_are_chosen_and_a_spent_budget_is_said(
        self, driver: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert driver.main(["--out", str(tmp_path), "--only", "good"]) == 0
        assert driver.main(["--out", str(tmp_path), "--budget", "1"]) == 1
        assert capfd.readouterr().out.count("no time left") == 3

    def test_every_part_is_there(self) -> None:
        for part in load("run_te_gpu").PARTS:
            program = next((word for word in part.command if word.endswith(".py")), None)
            assert program is None or (BENCHMARKS.parent / program).exists()

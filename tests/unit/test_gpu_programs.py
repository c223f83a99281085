# SPDX-License-Identifier: Apache-2.0
"""The parts of the GPU programs that need no GPU: which T are tried, what figures say."""

from __future__ import annotations

import itertools
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_programs import load

from ub_dynamic.backends.names import GEMM_METHODS
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.testing import te_policy
from ub_dynamic.testing.te_bits import random_lengths, refusal, sweeps
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, differing, outside_tolerance

pytestmark = pytest.mark.usefixtures("importable")


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

    def test_fused_operations_are_left_out_where_they_do_not_run_in_fp8(self) -> None:
        for one, other in zip(sweeps(2, 4, 512, 1024), sweeps(2, 4, 512, 1024, fused_fp8=False), strict=True):
            left = {kind for kind in one.kinds if kind not in other.kinds}
            fused = {kind for kind in one.kinds if kind.startswith("te.ops")}
            assert left == (fused if one.mode == "fp8" else set())
            assert one.lengths == other.lengths

    @pytest.mark.parametrize(("tp", "devices", "left"), [(2, 1, set()), (4, 1, {"dgrad_pipeline"}), (4, 2, set())])
    def test_what_would_starve_on_a_shared_gpu_is_left_out(
        self, tp: int, devices: int, left: set[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        world = types.SimpleNamespace(size=tp)
        assert {sweep.overlap for sweep in sweeps(tp, 4, 512, 1024) if refusal(world, sweep)} == left


class TestPolicyStages:
    @pytest.mark.parametrize(("tp", "devices", "most"), [(2, 1, 16), (4, 1, 8), (4, 4, 16)])
    def test_every_t_has_choices_that_its_gpu_can_take(
        self, tp: int, devices: int, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        world = types.SimpleNamespace(size=tp)
        found = te_policy.stages(world, 1)
        assert te_policy.stages(world, 1) == found
        assert te_policy.CAPACITY in found  # so that each change of T is a switch
        configs = [config for choices in found.values() for config in choices.values()]
        assert {config.method for config in configs} == {"none", "bulk", "pipeline", "ring_exchange"}
        assert max(config.num_sm or 0 for config in configs) == most
        assert any(config.aggregate for config in configs)
        for choices in found.values():
            assert set(choices) == set(GEMM_METHODS)
            assert (choices["fc1_fprop"].method == "none") == (choices["fc2_dgrad"].method == "none")
        policy = te_policy.policy_of_stages(found)
        assert all(policy.choices(tokens)["fc2_fprop"].config == found[tokens]["fc2_fprop"] for tokens in found)

    def test_layers_are_built_for_a_choice(self) -> None:
        choices = {"fc1_fprop": OverlapConfig("none"), "fc2_fprop": OverlapConfig("pipeline"),
                   "fc1_dgrad": OverlapConfig("ring_exchange")}  # fmt: skip
        assert te_policy.layer_flags(choices, "fc1_fprop", "fc2_fprop", "fc1_dgrad") == {
            "ub_overlap_ag": False,
            "ub_overlap_rs": True,
            "ub_overlap_rs_dgrad": True,
            "ub_bulk_dgrad": False,
            "ub_bulk_wgrad": False,
        }


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
        step = {"kind": "step", "active_over_exact": 1.004}
        costs = {"guard_cost_fraction": 0.002, "auto_cost_fraction": 0.003}
        ends = {"active_over_exact_low": 1.003, "active_over_exact_high": 1.007}
        rows: list[dict[str, Any]] = [
            {"tp": 2, **step, **ends, "active_over_pad_excess": 0.01},
            {"tp": 2, **step, "active_over_exact": 0.99, "active_over_pad_excess": -0.01, **costs},
            {"tp": 2, "kind": "lengths", "time_over_token_ratio": 1.01},
        ]
        made = load("te_step").figures(rows)
        assert made == {
            "active_over_exact_max": 1.004,
            "active_over_exact_interval_max": pytest.approx(0.002),
            "active_over_pad_excess_max": 0.01,
            **costs,
            "lengths_time_over_token_ratio": 1.01,
        }

    def test_bits(self) -> None:
        row = {
            "overlap": "default",
            "layer": "te.Linear row",
            "recipe": "current",
            "cases": 40,
            "mismatches": 0,
            "unrepeatable": 0,
        }
        against = {"plain_relative_error": 0.13, "stock_relative_error": 0.13}
        outside = {"plain_outside_te_tolerance": 2, "stock_outside_te_tolerance": 2, "outside_beyond_stock": 0}
        made = load("te_bits").figures([{**row, **against, **outside, "tensors": 120, "plain_cases": 4}] * 2)
        assert made["cases"] == 80
        assert made["outside_beyond_stock"] == 0
        assert made["stock_outside_te_tolerance"] == 4
        assert made["stock_relative_error_max_fp8"] == 0.13

    def test_real_lengths_fill_the_capacity(self) -> None:
        lengths = load("te_step").real_lengths(24, 4, 16384)
        assert len(lengths) == 24
        assert max(lengths) == 16384
        assert all(tokens % 4 == 0 for tokens in lengths)
        assert len(set(lengths)) > 15

    def test_policy(self) -> None:
        bits = {"kind": "bits", "microbatches": 1000, "switches": 2900, "configurations": 40, "mismatches": 0,
                "memory_growth_bytes": -512}  # fmt: skip
        cost = {"kind": "cost", "switch_cost_us": 1.5, "switching_growth_bytes": 4096}
        assert load("te_policy").figures([bits, {**bits, "switches": 2800, "mismatches": 1}, cost]) == {
            "microbatches": 1000,
            "switches": 2800,
            "configurations": 40,
            "mismatches": 1,
            "switch_cost_us": 1.5,
            "memory_growth_bytes": 4096,
        }

    def test_memcheck_reads_every_summary(self) -> None:
        program = load("te_memcheck")
        text = b"========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 12 errors\n"
        assert [int(count) for count in program._SUMMARY.findall(text)] == [0, 12]


SIGNALLED = pytest.mark.parametrize(("signalled", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])


@SIGNALLED
def test_memcheck_that_a_signal_ends_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signalled: BaseException, status: int
) -> None:
    program = load("te_memcheck")

    def run(*_: Any) -> Any:
        raise signalled

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(program.shutil, "which", lambda name: name)
    assert program.main(program.parse(["--tp", "2", "4", "--out", str(tmp_path)])) == status
    (row,) = json.loads((tmp_path / "te_memcheck.json").read_text())["rows"]
    assert (row["status"], row["errors"]) == (status, 1)


@SIGNALLED
def test_a_program_that_a_signal_ends_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signalled: BaseException, status: int
) -> None:
    import _one_gpu

    started = []

    def collect(command: Any, mode: str, ranks: int, timeout_s: float, on_event: Any, **_: Any) -> Any:
        started.append(ranks)
        on_event({"row": {"tp": ranks, "ms": 2.5}})
        raise signalled

    monkeypatch.setattr(_one_gpu, "collect", collect)
    options = _one_gpu.parser("A program.").parse_args(["--out", str(tmp_path)])
    assert _one_gpu.main("program", options, lambda *_: None, lambda rows: {"rows": len(rows)}) == status
    assert started == [2], "nothing is started after it"
    record = json.loads((tmp_path / "program.json").read_text())
    assert record["rows"] == [{"tp": 2, "ms": 2.5}] and record["figures"] == {"rows": 1, "failed_starts": 1}

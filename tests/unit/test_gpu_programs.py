# SPDX-License-Identifier: Apache-2.0
"""The parts of the GPU programs that need no GPU: which T are tried, what figures say, how the driver ends parts."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import tarfile
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ub_dynamic.backends.names import GEMM_METHODS
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.testing import te_policy
from ub_dynamic.testing.te_bits import random_lengths, refusal, sweeps
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
    for name in ("_one_gpu", "_side_by_side", "packed", "packed.data"):
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
        step = {"kind": "step", "active_over_exact": 1.004, "active_over_exact_interval": 0.002}
        costs = {"guard_cost_fraction": 0.002, "auto_cost_fraction": 0.003}
        rows: list[dict[str, Any]] = [
            {"tp": 2, **step, "active_over_pad_excess": 0.01},
            {"tp": 2, **step, "active_over_exact": 0.99, "active_over_pad_excess": -0.01, **costs},
            {"tp": 2, "kind": "lengths", "time_over_token_ratio": 1.01},
        ]
        made = load("te_step").figures(rows)
        assert made == {
            "active_over_exact_max": 1.004,
            "active_over_exact_interval_max": 0.002,
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


@pytest.mark.parametrize(("signalled", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
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


class TestDriver:
    RESULT = (
        "import json, sys, time; tp = int(sys.argv[1]); "
        "json.dump({'name': 'te_stress', 'date': str(tp), 'command': f'python te_stress.py --tp {tp} --seed 1', "
        "'mode': f'one-gpu-{tp}-ranks', 'figures': {'failed_starts': 0}, 'rows': [{'tp': tp, 'operations': 10 * tp, "
        "'mismatches': tp - 2, 'shape_changes': 5, 'memory_growth_bytes': 0}]}, "
        "open(sys.argv[2] + '/te_stress.json', 'w'))"
    )

    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        driver = load("run_te_gpu")
        part = driver.Part
        parts = (
            part("bad", ("-c", "print('what went wrong'); raise SystemExit(3)"), 60),
            part("slow", ("-c", "import time; time.sleep(300)"), 8.0, ranks=4),
            part("te_stress-tp4", ("-c", self.RESULT, "4", "{out}"), 60, "te_stress", ranks=4),
            part("te_stress-tp2", ("-c", self.RESULT, "2", "{out}"), 60, "te_stress", alone=True),
        )
        # what the driver imports to merge results goes by the program's name, here "-c"
        parts = tuple(replace(one, command=("-c", *one.command[1:])) for one in parts)
        monkeypatch.setattr(driver, "PARTS", parts)
        stress = types.SimpleNamespace(figures=load("te_stress").figures)
        monkeypatch.setattr(driver.importlib, "import_module", lambda name: stress)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(sys.modules["_side_by_side"].shutil, "which", lambda name: None)
        return driver

    def test_a_part_that_fails_or_hangs_does_not_stop_the_others(
        self, driver: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        archive, out = tmp_path / "all.tar.gz", tmp_path / "out"
        assert driver.main(["--out", str(out), "--archive", str(archive), "--budget", "120"]) == 1
        said = capfd.readouterr().out
        assert "what went wrong" in said
        summary = {line.split()[0]: line.split()[1] for line in said.partition("summary\n")[2].splitlines()}
        assert summary == {"bad": "3", "slow": "124", "te_stress-tp4": "0", "te_stress-tp2": "0"}
        merged = json.loads((out / "te_stress.json").read_text())
        assert merged["figures"]["operations"] == 20
        assert merged["figures"]["mismatches"] == 2
        assert merged["command"] == "python te_stress.py --tp 2 4 --seed 1"
        assert [row["tp"] for row in merged["rows"]] == [2, 4]
        assert merged["mode"] == "one-gpu-4-ranks"
        with tarfile.open(archive) as tar:
            names = {Path(name).name for name in tar.getnames()}
        assert names >= {"te_stress.json", "bad.log", "slow.log", "te_stress-tp4.log"}

    def test_parts_are_chosen_and_a_spent_budget_is_said(
        self, driver: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert driver.main(["--out", str(tmp_path), "--only", "te_stress-tp4"]) == 0
        assert driver.main(["--out", str(tmp_path), "--budget", "1"]) == 1
        # each is said once when it is decided and once in the summary
        assert capfd.readouterr().out.count("no time left") == 2 * 4

    def test_no_more_side_by_side_than_there_is_room_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        side = load("_side_by_side")
        monkeypatch.setattr(side.shutil, "which", lambda name: None)
        write = "import sys, time; print(time.monotonic()); time.sleep(1.0); print(time.monotonic())"
        parts = [side.Part(f"wide{n}", ("-c", write), 60, ranks=4) for n in range(2)]
        parts += [side.Part(f"narrow{n}", ("-c", write), 60, ranks=2) for n in range(3)]
        parts += [side.Part("alone", ("-c", write), 60, alone=True)]
        ended: list[Any] = []
        runner = side.Runner(tmp_path, ended.append, {})
        runner.phase(parts, side.time.monotonic() + 100, lambda: None)
        assert {one.status for one in ended} == {0}
        spans = {one.part.name: [float(x) for x in one.log.read_text().splitlines()[1:]] for one in ended}
        slots = {part.name: part.slots for part in parts}
        for begin, _ in spans.values():
            assert sum(slots[name] for name, (one, other) in spans.items() if one <= begin < other) <= side.SLOTS

    def test_every_part_is_there(self) -> None:
        parts = load("run_te_gpu").PARTS
        assert len({part.name for part in parts}) == len(parts)
        for part in parts:
            for word in part.command:
                assert not word.endswith(".py") or (BENCHMARKS.parent / word).exists()


class TestSeveralGpus:
    @pytest.mark.parametrize("gpus", [2, 4, 8])
    def test_the_plan_fits_a_lease_and_ends_in_the_suffix(
        self, gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        program = load("several_gpus")
        assert program.main(["--gpus", str(gpus), "--dry-run", "--out", str(tmp_path)]) == 0
        *lines, total = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"te_bits_x{gpus}") and "--gpus" in lines[0]
        assert [line.split()[0] for line in lines].index("tune_h4096") < len(lines) / 2
        assert float(total.split()[2]) <= 20 * 60
        assert not any(tmp_path.iterdir())

    def test_words_are_those_of_the_commands(self) -> None:
        from typer.main import get_command

        from ub_dynamic.cli.app import app

        program = load("several_gpus")
        setup = program.Setup(2, "te", "x2", Path("out"), Path("tables"))
        command: Any = get_command(app)
        for part in program.plan(setup):
            if part.words[:2] == program.MODULE:
                words = part.words[2:]
                inner = command.commands[words[0]]
                if words[0] == "bench":
                    inner, words = inner.commands[words[1]], words[1:]
                known = {name for option in inner.params for name in option.opts}
                assert {word for word in words[1:] if word.startswith("--")} <= known

    def test_a_part_that_is_there_is_not_run_again_and_a_failure_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        program = load("several_gpus")
        here = tmp_path / "here.json"
        here.write_text("{}")
        parts = [
            program.Part("done", ("-c", "raise SystemExit(9)"), 1.0, here),
            program.Part("bad", ("-c", "print('why'); raise SystemExit(3)"), 1.0, tmp_path / "bad.json"),
            program.Part("good", ("-c", "print('fine')"), 1.0, tmp_path / "good.json"),
        ]
        assert program.run(parts, tmp_path, 100.0) == ["bad"]
        said = capsys.readouterr().out
        assert "is there already" in said and "status 3" in said and "why" in said
        assert (tmp_path / "good.log").read_text().startswith("fine")
        assert program.run(parts[1:], tmp_path, 5.0) == ["bad", "good"]  # no time left

    def test_operations_of_every_size_make_one_result(self, tmp_path: Path) -> None:
        program = load("several_gpus")
        setup = program.Setup(2, "te", "x2", tmp_path, tmp_path)
        for hidden, over in ((4096, 0.9), (8192, 1.02)):
            rows = [{"gemm": "fc2_fprop", "tokens": 4096, "hidden": hidden, "over_best_peer": over}]
            record = {"name": "x", "date": "", "command": "", "figures": {}, "rows": rows}
            setup.result(f"ops_h{hidden}").write_text(json.dumps(record))
        merged = json.loads(program.merge_ops(setup).read_text())
        assert (merged["name"], len(merged["rows"])) == ("ops_x2", 2)
        assert merged["figures"]["over_best_peer_max"] == 1.02
        assert merged["figures"]["over_best_peer_geomean_t4096"] == pytest.approx((0.9 * 1.02) ** 0.5)

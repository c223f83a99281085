# SPDX-License-Identifier: Apache-2.0
"""The programs that start the GPU programs: parts end without each other, the plans fit the time there is."""

from __future__ import annotations

import json
import sys
import tarfile
import types
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_programs import BENCHMARKS, load

pytestmark = pytest.mark.usefixtures("importable")


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
            part("killed", ("-c", "import os; os.kill(os.getpid(), 9)"), 60),
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
        assert summary == {"bad": "3", "killed": "137", "slow": "124", "te_stress-tp4": "0", "te_stress-tp2": "0"}
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
        assert capfd.readouterr().out.count("no time left") == 2 * len(driver.PARTS)

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

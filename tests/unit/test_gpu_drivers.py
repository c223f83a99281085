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
import torch
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


def part_of(parts: ModuleType, tmp_path: Path, name: str, program: str, seconds: float = 1.0, **more: Any) -> Any:
    return parts.Part(name, ("-c", program), seconds, tmp_path / f"{name}.json", **more)


class TestParts:
    @pytest.fixture
    def parts(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        module = load("_parts")
        monkeypatch.setattr(module, "START_S", 2.0)
        return module

    def test_a_part_that_is_there_is_not_run_again_and_a_failure_is_said(
        self, parts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "done.json").write_text("{}")
        write = f"print('fine'); open({str(tmp_path / 'good.json')!r}, 'w').write('{{}}')"
        made = [
            part_of(parts, tmp_path, "done", "raise SystemExit(9)"),
            part_of(parts, tmp_path, "bad", "print('why'); raise SystemExit(3)"),
            part_of(parts, tmp_path, "good", write),
            part_of(parts, tmp_path, "silent", "print('no file')"),
        ]
        assert parts.run(made, tmp_path, 100.0) == ["bad", "silent"]
        said = capsys.readouterr().out
        assert "is there already" in said and "status 3" in said and "why" in said
        assert (tmp_path / "good.log").read_text().startswith("fine")

    def test_a_part_is_begun_only_with_all_of_its_time(
        self, parts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        long = part_of(parts, tmp_path, "long", "pass", seconds=60.0)
        assert long.needs_s == 2.0 + 60.0 + parts.END_S
        assert parts.run([long], tmp_path, long.needs_s - 1) == ["long"]
        assert "no time left" in capsys.readouterr().out and not (tmp_path / "long.log").exists()

    def test_a_program_is_told_to_end_before_it_is_ended(self, parts: ModuleType, tmp_path: Path) -> None:
        program = "import os, sys; print(sys.argv[1], os.environ['UB_DYNAMIC_BENCH_START_S'])"
        part = parts.Part("told", ("-c", program, "{limit}"), 20.0, tmp_path / "told.json")
        parts.run([part], tmp_path, 40.0)
        limit, beside = map(float, (tmp_path / "told.log").read_text().split())
        assert 40.0 - 2 * parts.END_S < limit <= 40.0 - parts.END_S
        assert abs(20.0 + beside - limit) < 1

    @pytest.mark.parametrize(
        ("record", "done"),
        [
            ({"figures": {"failed_starts": 1}, "rows": [{}, {}]}, False),
            ({"figures": {}, "rows": [{}]}, False),
            ({"figures": {}, "rows": [{}, {}]}, True),
            ({"rows": [{"candidates": [1]}, {"candidates": []}]}, False),
            ({"rows": [{"candidates": [1]}, {"candidates": [1]}]}, True),
        ],
    )
    def test_done_is_every_row_measured(
        self, parts: ModuleType, tmp_path: Path, record: dict[str, Any], done: bool
    ) -> None:
        part = part_of(parts, tmp_path, "p", "", rows=2)
        assert not parts.is_done(part)
        part.writes.write_text('{"cut o')
        assert not parts.is_done(part)
        (tmp_path / "p.png").touch()  # the picture of a table
        part.writes.write_text(json.dumps(record))
        assert parts.is_done(part) is done

    def test_a_result_of_a_table_that_has_grown_since_is_not_done(self, parts: ModuleType, tmp_path: Path) -> None:
        table = tmp_path / "table.json"
        part = part_of(parts, tmp_path, "p", "", table=table)
        part.writes.write_text('{"date": "2026-12-01T10:00:00+00:00", "rows": []}')
        assert parts.is_done(part)
        for date, done in (("2026-12-01T09:00:00+00:00", True), ("2026-12-01T11:00:00+00:00", False)):
            table.write_text(json.dumps({"date": date, "rows": []}))
            assert parts.is_done(part) is done

    def test_a_table_that_grows_is_taken_up_again_and_one_that_does_not_is_left(
        self, parts: ModuleType, tmp_path: Path
    ) -> None:
        file = tmp_path / "table.json"
        grow = (
            "import json, pathlib; p = pathlib.Path(%r); "
            "n = len(json.loads(p.read_text())['rows']) if p.exists() else 0; "
            "p.write_text(json.dumps({'rows': [{'candidates': [1]}] * min(n + 1, %d)}))"
        )
        part = parts.Part("tune", ("-c", grow % (str(file), 3)), 1.0, file, rows=3, resumes=True)
        assert parts.run([part], tmp_path, 100.0) == []
        assert parts.measured_rows(file) == 3
        stuck = parts.Part("stuck", ("-c", grow % (str(file), 3)), 1.0, file, rows=4, resumes=True)
        assert parts.run([stuck], tmp_path, 100.0) == ["stuck"]

    def test_the_next_machine_goes_on_from_the_archive(self, parts: ModuleType, tmp_path: Path) -> None:
        first, archive = tmp_path / "first", tmp_path / "all.tar.gz"
        (first / "tables").mkdir(parents=True)
        (first / "a.json").write_text("old")
        (first / "tables" / "t.json").write_text("table")
        parts.pack(archive, first)
        second = tmp_path / "another name"
        second.mkdir()
        (second / "a.json").write_text("newer")
        parts.unpack(archive, second)
        assert (second / "a.json").read_text() == "newer"
        assert (second / "tables" / "t.json").read_text() == "table"
        parts.unpack(tmp_path / "absent.tar.gz", second)
        parts.unpack(None, second)


class TestSeveralGpus:
    @pytest.mark.parametrize("gpus", [2, 4, 8])
    def test_the_plan_fits_three_commands_the_first_two_of_which_have_what_matters(self, gpus: int) -> None:
        import _parts

        program = load("several_gpus")
        parts = program.plan(program.Setup(gpus, "te", f"x{gpus}", Path("out")))
        commands = _parts.in_commands(parts, _parts.BUDGET_S)
        assert len(commands) == 3
        names = [part.name for command in commands[:2] for part in command]
        assert names[:2] == [f"gpus_seen_x{gpus}", f"te_bits_x{gpus}"]
        assert {"tune_h8192", "ops_h8192", "tp_step_h4096", "tp_step_layer_h4096"} < {*names}
        for command in commands:
            assert sum(_parts.START_S + part.seconds for part in command) + _parts.END_S <= _parts.BUDGET_S <= 560
        assert sum(_parts.START_S + part.seconds for part in parts) <= 23 * 60

    def test_steps_are_asked_for_without_what_guard_and_auto_cost_where_the_device_is_the_limit(self) -> None:
        program = load("several_gpus")
        parts = {part.name: part for part in program.plan(program.Setup(2, "te", "x2", Path("out")))}
        assert [parts[f"tune_h{hidden}"].rows for hidden in (4096, 8192)] == [8 * 6, 8 * 6]
        for name, seconds in (("tp_step_h4096", 100), ("tp_step_layer_h4096", 105), ("tp_step_h8192", 95)):
            words = parts[name].words
            assert "--no-costs" in words and words[words.index("--tokens") + 1] == "2048,4096,8192,16384"
            assert (parts[name].seconds, parts[name].rows) == (seconds, 4)
        bits = parts["te_bits_x2"].words
        assert bits[bits.index("--lengths") + 1] == "40"

    def test_a_dry_run_says_what_runs_in_which_command_and_makes_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        assert load("several_gpus").main(["--gpus", "2", "--dry-run", "--out", str(out)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split()[:3] == ["command", "1", "gpus_seen_x2"] and "--gpus" in lines[0]
        assert lines[-1].startswith("command 3") and not out.exists()

    @pytest.mark.parametrize("program", ["several_gpus", "several_gpus_cp"])
    def test_too_few_gpus_are_refused_with_the_reason(
        self, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        out = tmp_path / "out"
        with pytest.raises(SystemExit) as ended:
            load(program).main(["--gpus", "2", "--out", str(out)])
        assert ended.value.code == 2 and not out.exists()
        assert "torch sees 1 GPU(s) here, and 2 ranks need one each" in capsys.readouterr().err

    def test_words_are_those_of_the_commands(self) -> None:
        from typer.main import get_command

        from ub_dynamic.cli.app import app

        program = load("several_gpus")
        setup = program.Setup(2, "te", "x2", Path("out"))
        command: Any = get_command(app)
        for part in program.plan(setup):
            if part.words[:2] == program.MODULE:
                words = part.words[2:]
                inner = command.commands[words[0]]
                if words[0] == "bench":
                    inner, words = inner.commands[words[1]], words[1:]
                known = {name for option in inner.params for name in (*option.opts, *option.secondary_opts)}
                assert {word for word in words[1:] if word.startswith("--")} <= known

    def test_operations_of_every_size_make_one_result_that_hides_nothing(self, tmp_path: Path) -> None:
        program = load("several_gpus")
        setup = program.Setup(2, "te", "x2", tmp_path)
        for hidden, over, failed in ((4096, 0.9, {"failed_starts": 1}), (8192, 1.02, {})):
            row = {"gemm": "fc2_fprop", "tokens": 4096, "hidden": hidden, "over_best_peer": over, "none_us": 1.0}
            row |= {"over_best_peer_low": 0.99 * over, "over_best_peer_high": 1.01 * over}
            row |= {"async_tp_us": 2.0} if hidden == 4096 else {}
            record = {"name": "x", "date": "", "command": "", "figures": failed, "rows": [row]}
            setup.result(f"ops_h{hidden}").write_text(json.dumps(record))
        merged = json.loads(program.merge_ops(setup).read_text())
        assert (merged["name"], len(merged["rows"])) == ("ops_x2", 2)
        figures = merged["figures"]
        assert figures["over_best_peer_max"] == 1.02
        assert figures["over_best_peer_interval_max"] == pytest.approx(0.0102)
        assert figures["over_best_peer_geomean_t4096"] == pytest.approx((0.9 * 1.02) ** 0.5)
        assert (figures["failed_starts"], figures["cells_wanted"]) == (1, 2 * 8 * 6)
        assert (figures["cells_with_async_tp"], figures["cells_without_async_tp"]) == (1, 95)
        assert (figures["cells_with_none"], figures["cells_with_cublasmp"]) == (2, 0)
        setup.result("ops_h8192").unlink()  # a size that is not there at all
        assert json.loads(program.merge_ops(setup).read_text())["figures"]["failed_starts"] == 2


class TestRehearsal:
    def test_every_part_of_both_plans_is_in_it_and_none_ends_in_the_suffix_of_several_gpus(
        self, tmp_path: Path
    ) -> None:
        rehearse = load("rehearse")
        parts = rehearse.plan(2, "te", tmp_path)
        real = load("several_gpus").plan(load("several_gpus").Setup(2, "te", "x2", tmp_path, hiddens=(1024,)))
        real += load("several_gpus_cp").plan(2, tmp_path, "x2")
        names = {part.name.removesuffix("_rehearsal2").removesuffix("_rehearsal") for part in parts}
        assert {part.name.removesuffix("_x2") for part in real} <= names
        for part in parts:
            assert part.writes.stem.endswith(("_rehearsal", "_rehearsal2")), part
            assert ("--gpus" in part.words) == (part.name == "gpus_seen_rehearsal")

    def test_only_what_has_no_userbuffers_runs_beside_what_has(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rehearse = load("rehearse")
        lanes: list[list[str]] = []

        def run(lane: list[Any], out: Path, budget_s: float, after: Any) -> list[str]:
            lanes.append([part.name for part in lane])
            after()
            return [part.name for part in lane[:1]]

        monkeypatch.setattr(rehearse._parts, "run", run)
        monkeypatch.setattr(rehearse, "find_gpus", list)
        parts = rehearse.plan(2, "te", tmp_path)
        options = types.SimpleNamespace(budget=1.0, archive=tmp_path / "a.tar.gz", in_turn=False)
        assert rehearse.run(parts, "te", tmp_path, options) == ["gpus_seen_rehearsal", "tune_h1024"]
        others = ["cp_te_rehearsal2", "cp_hierarchical_rehearsal2", "attnres_rehearsal2"]
        assert ["gpus_seen_rehearsal", *others] in lanes and sum(map(len, lanes)) == len(parts)
        options.in_turn = True
        lanes.clear()
        rehearse.run(parts, "te", tmp_path, options)
        assert sorted(map(len, lanes)) == [0, len(parts)]

    def test_nothing_goes_into_the_results(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("UB_DYNAMIC_RESULTS", str(tmp_path))
        with pytest.raises(SystemExit):
            load("rehearse").main(["--out", str(tmp_path / "below")])
        assert not list(tmp_path.iterdir())

    def test_what_is_in_a_folder_stays(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a file").write_text("mine")
        with pytest.raises(SystemExit):
            load("rehearse").main(["--on", "cpu", "--out", str(tmp_path)])
        assert "is not empty" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["a file"]

    @pytest.mark.parametrize(
        ("name", "rows", "found"),
        [
            ("ops_h1024", [{"default_us": 1.0, "plain_us": 1.0, "over_best_peer": 1.0, "best_peer": "default"}], []),
            ("ops_h1024", [{"none_us": 1.0, "async_tp_over_plain": 2.0}], ["async_tp_over_plain", "none_us"]),
            ("tp_step_h1024", [{"dynamic_ms": 1.0, "active_over_exact": 1.0}], []),
            ("tp_step_h1024", [{"active_over_none": 1.0}], ["active_over_none"]),
            ("tune_h1024", [{"candidates": [{"config": {"method": "none"}}]}], ["a candidate {'method': 'none'}"]),
            ("cp_te_rehearsal2", [{"stock_launches": 3}], []),
            ("cp_te_rehearsal2", [{"stock_ms": 1.0, "both_over_stock": 1.0}], ["both_over_stock", "stock_ms"]),
            ("cp_hierarchical_rehearsal2", [{"ms": 1.0}], ["ms"]),
        ],
    )  # fmt: skip
    def test_what_a_shared_gpu_cannot_compare_is_an_error(
        self, tmp_path: Path, name: str, rows: list[dict[str, Any]], found: list[str]
    ) -> None:
        rehearse = load("rehearse")
        part = next(part for part in rehearse.plan(2, "te", tmp_path) if part.name == name)
        part.writes.parent.mkdir(exist_ok=True)
        part.writes.write_text(json.dumps({"mode": "one-gpu-2-ranks", "rows": rows}))
        mode = rehearse.mode_of(part, 2, "te")
        assert rehearse.wrong(part, mode) == [f"it has {each}" for each in found]
        part.writes.write_text(json.dumps({"mode": "2-gpus", "figures": {"wrong": 2, "mismatches": 0}, "rows": []}))
        assert rehearse.wrong(part, mode) == ["mode is 2-gpus, not one-gpu-2-ranks", "wrong is 2"]

    def test_what_is_left_out_is_said(self, tmp_path: Path) -> None:
        rehearse = load("rehearse")
        parts = {part.name: part for part in rehearse.plan(2, "te", tmp_path)}
        assert rehearse.unsaid(parts["ops_h1024"], "left out: none: ranks\nleft out: cublasmp: ranks") == [
            "it does not say why async_tp is left out"
        ]
        assert rehearse.unsaid(parts["tune_h1024"], "left out: none: ranks") == []
        assert rehearse.unsaid(parts["tp_step_zeros_h1024"], "") == []
        assert rehearse.unsaid(parts["cp_te_rehearsal2"], "left out: times, as of none") == []
        assert rehearse.unsaid(parts["cp_te_rehearsal2"], "") == ["it does not say why times is left out"]

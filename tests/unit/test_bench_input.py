# SPDX-License-Identifier: Apache-2.0
"""The commands `bench` and `tune` refuse bad input in one line, before any rank is started or any file is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ub_dynamic.bench import asked, tp_step
from ub_dynamic.bench.asked import check_asked
from ub_dynamic.bench.benches import BENCHES
from ub_dynamic.bench.start import Ended
from ub_dynamic.cli import measuring
from ub_dynamic.cli.app import app
from ub_dynamic.errors import UBDynamicError, UBShapeError, UBUnsupportedError
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.tuning_table import TuningRow, TuningTable, these_versions, this_machine

TABLE = TuningTable(
    machine=this_machine(),
    versions=these_versions(),
    tp=2,
    hidden=256,
    ffn=1024,
    dtype="float32",
    mode="cpu-mpi",
    date="today",
    command="tune",
    rows=(TuningRow("fc2_fprop", 64, OverlapConfig("none"), "so"),),
)


class Started(Exception):
    """A rank would be started."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*_: Any, **__: Any) -> Ended:
        raise Started

    monkeypatch.setattr(measuring, "run", run)
    monkeypatch.setattr(asked, "mode_of", lambda backend, ranks: "cpu-mpi" if backend == "host" else f"{ranks}-gpus")
    monkeypatch.setattr(measuring, "mode_of", asked.mode_of)
    for module in ("tune", "bench"):
        monkeypatch.setattr(f"ub_dynamic.cli.{module}.mode_of", asked.mode_of)
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"format": 1}')
    Path("lengths").write_text("12\n²\n")
    Path("negative").write_text("12\n-1\n")
    Path("zeros").write_text("0\n0\n")
    Path("tiny").write_text("1\n50\n")
    TABLE.save("table.json")
    replace(TABLE, hidden=512).save("other.json")
    replace(TABLE, rows=(TuningRow("fc3", 64, OverlapConfig("none"), "so"),)).save("gemm.json")


def command(*words: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words))


REFUSED = [
    ("bench op --backend mpi", "--backend: 'mpi' is neither host nor te"),
    ("bench op --gemms fc3", "--gemms: 'fc3' is not one of fc1_fprop"),
    ("bench op --gemms ,", "--gemms: ',' names nothing; it takes fc1_fprop"),
    ("bench op --tokens a:b", "not FIRST:LAST"),
    ("bench op --tokens 512:64", "first must be positive and at most the last; the next valid value is 512:512"),
    ("bench op --tokens 0:64", "the next valid value is 1:64"),
    ("bench op --tokens 1:1", "no multiple of 2 is that small; the next is 2"),
    ("bench op --tokens 0,64", "T = 0 must be positive; the next valid value is 2"),
    ("bench op --tokens 64,5²", "'5²' of '64,5²' is not a T in the digits 0 to 9"),
    ("bench op --tokens ²:64", "'²:64' is not FIRST:LAST in the digits 0 to 9"),
    ("bench tp-step --tokens ,", "holds no T"),
    ("bench op --tokens ,", "holds no T: it is a list, as in 512,1024"),
    ("bench op --tokens 999999999999", "the largest valid capacity is [8388606, 256]"),
    ("bench op --hidden 40", "H = 40 must be a multiple of 8 * num_splits = 32; the next valid H is 64"),
    ("bench op --ranks 3", "tp = 3, but its kernels exist for tp in (2, 4, 8, 16, 32)"),
    ("bench op --ffn 1025", "ffn = 1025 must be a positive multiple of tp = 2; the next valid value is 1026"),
    ("bench op --policy bad.json", "bad.json: no tuning table that this version reads: format is 1"),
    ("bench op --policy table.json --ffn 512", "ffn is 1024, here 512"),
    ("bench op --policy other.json", "hidden is 512, here 256"),
    ("bench op --json Result.json", "--json: Result.json: name it with lower-case letters, digits and _"),
    ("bench op --seconds inf", "seconds = inf: a number above 0"),
    ("bench tp-step --hidden 40", "the next valid H is 64"),
    ("bench tp-step --capacity 101", "the next valid capacity is [102, 256]"),
    ("bench tp-step --capacity 128 --tokens 256", "above the capacity of 128; the next valid value is 128"),
    ("bench tp-step --hidden 32 --capacity 64 --tokens 2", "the next valid T is 8"),
    ("bench tp-step --arms pad", "arms = pad: they are compared with dynamic; the next valid value is dynamic,pad"),
    ("bench tp-step --layer te.Linear", "--layer: 'te.Linear' is not one of te.LayerNormMLP, te.TransformerLayer"),
    ("bench tp-step --operands ones", "'ones' is not one of random, zeros"),
    ("bench tp-step --arms exact,none --plot x.svg", "the next valid value is dynamic,exact,none"),
    ("bench tp-step --arms policy", "arms = none that can be compared here"),
    ("bench tp-step --arms rebuild,none", "the next valid value is dynamic,rebuild,none"),
    ("bench tp-step --policy bad.json", "bad.json: no tuning table"),
    ("bench tp-step --policy gemm.json", "gemm.json: row 0 of a tuning table: a policy names the unknown GEMM 'fc3'"),
    ("bench tp-step --backend te --ffn 1024", "TE's layers are measured with ffn = 4 H = 16384 here, not 1024"),
    ("bench lengths --distributions zipf", "not one of openwebtext"),
    ("bench lengths --file lengths", "lengths, line 2: '²' is no length, an integer of at least 0"),
    ("bench lengths --file negative", "negative, line 2: -1 is no length; a length is at least 0"),
    ("bench lengths --file zeros", "would make a microbatch without any token"),
    ("bench lengths --file tiny --documents 1 --hidden 32", "the smallest microbatch of tiny: proj_fprop"),
    ("bench lengths --arms pad", "the next valid value is dynamic,pad"),
    ("bench set-shape --ranks 3", "tp = 3"),
    ("bench graphs --hidden 72", "the next valid H is 96"),
    ("bench graphs --capacity 100 --ranks 8", "the next valid capacity is"),
    ("bench graphs --capacity 73", "the next valid capacity is 128"),
    ("bench graphs --capacity 141", "the next valid capacity is 144"),
    ("tune --out t.json --hidden 64 --ffn 31", "ffn = 31 must be a positive multiple of tp = 2; the next"),
    ("tune --out t.json --tokens 512:64", "the next valid value is 512:512"),
    ("tune --out t.json --hidden 40", "the next valid H is 64"),
    ("tune --out t.json --tp 3", "tp = 3"),
    ("tune --out t.json --tokens 512,a", "'a' of '512,a' is not a T in the digits 0 to 9"),
    ("tune --out t.json --hidden 32 --tokens 2,4", "the next valid capacity is [8, 32]"),
    ("tune --out bad.json", "bad.json: no tuning table"),
    ("tune --out always", "policy='always' means something else"),
    (f"bench op --json {'a' * 300}/x.json", "File name too long"),
    ("tune --out deep/t.json --seconds inf", "seconds = inf"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[words for words, _ in REFUSED])
def test_bad_input_starts_nothing(words: str, says: str) -> None:
    result = command(*words.split())
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.output.splitlines()
    assert says in line
    assert not Path("t.json").exists() and not Path("deep").exists()


@pytest.mark.parametrize(
    "words",
    [
        "bench op --seconds nan",
        "bench op --ranks 1",
        "bench op --hidden 0",
        "bench tp-step --capacity -64",
        "bench lengths --count 0",
        "bench lengths --documents -1",
        "bench lengths --file nowhere",
        "bench set-shape --calls -1",
        "bench set-shape --calls 10000001",
        "bench set-shape --timed 10000001",
        "bench lengths --count 10001",
        "bench graphs --replays 0",
        "tune --out t.json --tp 0",
        "tune --out t.json --seconds nan",
    ],
)
def test_options_out_of_range_are_usage_errors(words: str) -> None:
    result = command(*words.split())
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "Invalid value" in result.output or "Error" in result.output


@pytest.mark.parametrize(
    "words",
    [
        "bench op",
        "bench op --policy table.json",
        "bench op --tokens 100,64 --peers default",
        "bench tp-step",
        "bench tp-step --policy table.json --arms policy,none",
        "bench lengths --file zeros --distributions arxiv --arms none",
        "bench set-shape --ranks 4",
        "bench graphs --hidden 1024",
        "bench tp-step --backend te --layer te.TransformerLayer",
        "tune --out t.json --backend te --tp 8",
    ],
)
def test_good_input_starts_the_ranks(words: str) -> None:
    if "zeros" in words:
        Path("zeros").write_text("0\n9\n")
    assert isinstance(command(*words.split()).exception, Started)


def test_without_a_gpu_graphs_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = command("bench", "graphs")
    assert result.exit_code == 2 and "torch sees none" in result.output


def test_every_bench_has_a_command() -> None:
    result = command("bench", "--help")
    assert all(name in result.output for name in BENCHES if name != "tune")


@pytest.mark.parametrize(("hidden", "tp", "valid"), [(608, 2, 640), (96, 16, 1024), (512, 16, 1024)])
def test_heads_that_cannot_be_cut(hidden: int, tp: int, valid: int) -> None:
    with pytest.raises(UBShapeError, match=f"the next valid value is {valid}"):
        tp_step.check_te_layer("te.TransformerLayer", hidden, 4 * hidden, tp)
    tp_step.check_te_layer("te.TransformerLayer", valid, 4 * valid, tp)
    tp_step.check_te_layer("te.LayerNormMLP", hidden, 4 * hidden, tp)


def test_on_gpus_a_table_is_held_against_te_s_own_limits() -> None:
    row = TuningRow("fc1_dgrad", 64, OverlapConfig("bulk", num_sm=33), "so")
    replace(TABLE, rows=(row,), hidden=4096, ffn=16384, dtype="bfloat16", mode="2-gpus").save("sms.json")
    options = {"hidden": 4096, "ffn": 16384, "capacity": 1024, "layer": "te.LayerNormMLP", "seconds": 1.0}
    options |= {"tokens": [512], "arms": ["policy"], "policy": "sms.json"}
    with pytest.raises(UBDynamicError, match=r"sms.json: fc1_dgrad .*: num_sm = 33.*the next valid value is 32"):
        check_asked("tp-step", options, "te", 2)
    TABLE.save("cpu.json")
    with pytest.raises(UBUnsupportedError, match="mode is cpu-mpi, here 2-gpus"):
        check_asked("tp-step", {**options, "policy": "cpu.json"}, "te", 2)


@pytest.mark.parametrize(
    ("tokens", "measured"), [("64,128", [64, 128]), ("100,63", [64, 100]), ("63:127", [64, 126]), ("64:99", [64, 98])]
)
def test_tune_takes_the_tokens_that_bench_takes(
    monkeypatch: pytest.MonkeyPatch, tokens: str, measured: list[int]
) -> None:
    jobs: list[Any] = []

    def run(job: Any, *_: Any, **__: Any) -> Ended:
        jobs.append(job)
        raise Started

    monkeypatch.setattr(measuring, "run", run)
    for words in ("tune --out t.json", "bench op"):
        command(*words.split(), "--tokens", tokens)
    assert [job["options"]["tokens"] for job in jobs] == [measured, measured]


def interrupt(rows: list[Any], signalled: BaseException) -> Any:
    def run(job: Any, backend: Any, ranks: int, timeout_s: float, on_event: Any, **_: Any) -> Ended:
        for row in rows:
            on_event({"row": row})
        raise signalled

    return run


@pytest.mark.parametrize(("signalled", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_a_bench_that_is_ended_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch, signalled: BaseException, status: int
) -> None:
    rows = [{"gemm": gemm, "tokens": 64, "default_us": 3.25} for gemm in ("fc1_fprop", "fc2_fprop")]
    monkeypatch.setattr(measuring, "run", interrupt(rows, signalled))
    result = command("bench", "op", "--json", "kept.json")
    assert result.exit_code == status, result.output
    assert "ended early; nothing is left running; rows that were measured: 2" in result.output
    assert "fc2_fprop" in result.output
    record = json.loads(Path("kept.json").read_text())
    assert record["rows"] == rows and record["figures"]["failed_starts"] == 1


def test_without_a_row_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "run", interrupt([], KeyboardInterrupt()))
    result = command("bench", "op", "--json", "kept.json")
    assert result.exit_code == 130 and "ended early; nothing is left running" in result.output
    assert not Path("kept.json").exists()


@pytest.mark.parametrize(
    ("words", "says"), [([], "the same command goes on"), (["--restart"], "the same command without --restart goes on")]
)
def test_a_tune_that_is_ended_says_how_it_goes_on(monkeypatch: pytest.MonkeyPatch, words: list[str], says: str) -> None:
    monkeypatch.setattr(measuring, "run", interrupt(TABLE.to_json()["rows"], KeyboardInterrupt()))
    result = command("tune", "--out", "t.json", *words)
    assert result.exit_code == 130, result.output
    assert "Written to t.json" in result.output and says in result.output
    assert TuningTable.load("t.json").rows == TABLE.rows


@pytest.mark.parametrize("value", ["abc", "", "nan", "inf", "0", "-3"])
@pytest.mark.parametrize("words", ["bench op", "tune --out t.json"])
def test_a_start_time_that_is_none_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, words: str, value: str
) -> None:
    monkeypatch.setenv("UB_DYNAMIC_BENCH_START_S", value)
    result = command(*words.split())
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    (line,) = result.output.splitlines()
    assert "UB_DYNAMIC_BENCH_START_S = " in line and "it is a positive, finite number of seconds, as 20 is" in line


@pytest.mark.parametrize("words", ["bench op", "bench graphs --hidden 1024", "tune --out t.json"])
def test_a_wait_that_is_none_is_one_line_before_any_rank_reads_it(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("UB_DYNAMIC_TIMEOUT", "abc")
    result = command(*words.split())
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    (line,) = result.output.splitlines()
    assert "UB_DYNAMIC_TIMEOUT = 'abc'" in line


def test_ranks_that_were_ended_for_their_time_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "run", lambda *_, **__: Ended(124, (), "last words"))
    monkeypatch.setenv("UB_DYNAMIC_BENCH_START_S", "40")
    result = command("bench", "op", "--seconds", "2")
    assert result.exit_code == 1
    assert "ended after 42 s: 2 s to measure in (--seconds" in result.output
    assert "40 s to start in (UB_DYNAMIC_BENCH_START_S)\nlast words" in result.output


def test_a_single_row_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"gemm": "fc1_fprop", "tokens": 64, "plain_us": 3.25}
    monkeypatch.setattr(measuring, "run", lambda *_, **__: Ended(0, ({"row": row},), ""))
    assert "3.25" in command("bench", "op").output


def test_a_partial_result_replaces_no_complete_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"gemm": "fc1_fprop", "tokens": tokens} for tokens in (64, 128)]
    whole = Ended(0, tuple({"row": row} for row in rows), "")
    for _ in range(2):  # a partial one may be replaced by either
        monkeypatch.setattr(measuring, "run", interrupt(rows[:1], KeyboardInterrupt()))
        assert "Written to kept.json\n" in command("bench", "op", "--json", "kept.json").output
    assert json.loads(Path("kept.json").read_text())["figures"]["interrupted"] == 1
    monkeypatch.setattr(measuring, "run", lambda *_, **__: whole)
    assert "Written to kept.json\n" in command("bench", "op", "--json", "kept.json").output
    for run in (interrupt(rows[:1], SystemExit(143)), lambda *_, **__: replace(whole, status=1)):
        monkeypatch.setattr(measuring, "run", run)
        said = command("bench", "op", "--json", "kept.json").output
        assert "Written to kept_partial.json; kept.json keeps its complete result" in said
    kept, partial = (json.loads(Path(f"kept{end}.json").read_text()) for end in ("", "_partial"))
    assert kept["rows"] == rows and "failed_starts" not in kept["figures"]
    assert partial["figures"]["failed_starts"] == 1 and "interrupted" not in partial["figures"]


def test_a_result_replaces_no_other_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path("table.json").read_text()
    result = command("bench", "op", "--json", "table.json")
    assert result.exit_code == 2 and "table.json is there and is no result file" in result.output
    rows = [{"gemm": "fc1_fprop", "tokens": 64}]
    monkeypatch.setattr(measuring, "run", lambda *_, **__: Ended(0, ({"row": rows[0]},), ""))
    command("bench", "op", "--json", "kept.json")
    Path("kept_partial.json").write_text(before)
    monkeypatch.setattr(measuring, "run", interrupt(rows, KeyboardInterrupt()))
    said = command("bench", "op", "--policy", "kept_partial.json", "--json", "kept.json").output
    assert "Written to kept_partial1.json" in said
    assert Path("table.json").read_text() == Path("kept_partial.json").read_text() == before


def test_a_t_below_the_smallest_valid_one_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = TABLE.to_json()["rows"][0]
    row = {**row, "tokens": 4, "candidates": [{"config": row["chosen"], "median_us": 1.0, "spread_us": 0.0}]}

    def run(job: Any, backend: Any, ranks: int, timeout_s: float, on_event: Any, **_: Any) -> Ended:
        for tokens in (4, 64):
            on_event({"row": {**row, "tokens": tokens}})
        return Ended(0, ({"row": row},), "")

    monkeypatch.setattr(measuring, "run", run)
    words = ("--hidden", "64", "--ffn", "128", "--tokens", "2,64", "--gemms", row["gemm"])
    assert "Not every cell" not in command("tune", "--out", "t.json", *words).output


def test_a_tune_whose_cells_are_all_there_advises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    row = TABLE.to_json()["rows"][0]
    row = {**row, "candidates": [{"config": row["chosen"], "median_us": 1.0, "spread_us": 0.0}]}
    others = {**row, "tokens": 2 * row["tokens"], "candidates": []}

    def run(job: Any, backend: Any, ranks: int, timeout_s: float, on_event: Any, **_: Any) -> Ended:
        for each in (row, others):
            on_event({"row": each})
        return Ended(0, ({"row": row},), "")

    monkeypatch.setattr(measuring, "run", run)
    asked_for = ["--gemms", row["gemm"], "--tokens", str(row["tokens"])]
    assert "Not every cell" not in command("tune", "--out", "t.json", *asked_for).output
    assert "Not every cell" in command("tune", "--out", "t.json").output


def test_a_start_time_is_read_only_where_ranks_are_started() -> None:
    wrong = {**os.environ, "UB_DYNAMIC_BENCH_START_S": "abc"}
    code = "import ub_dynamic.cli.app, ub_dynamic.cli.measuring"
    subprocess.run([sys.executable, "-c", code], env=wrong, check=True, timeout=120)


def test_the_start_time_is_added_to_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def run(job: Any, backend: Any, ranks: int, timeout_s: float, *_: Any, **__: Any) -> Ended:
        limits.append(timeout_s)
        raise Started

    monkeypatch.setattr(measuring, "run", run)
    for value in ("7.5", None):
        if value is None:
            monkeypatch.delenv("UB_DYNAMIC_BENCH_START_S")
        else:
            monkeypatch.setenv("UB_DYNAMIC_BENCH_START_S", value)
        command("bench", "op", "--seconds", "10")
    assert limits == [17.5, 160]

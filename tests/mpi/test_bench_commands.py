# SPDX-License-Identifier: Apache-2.0
"""The commands `bench` and `tune` with real ranks on the host, end to end, and a policy made from their table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ub_dynamic.bench.tuned import header
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.testing.launch import mpi_missing
from ub_dynamic.testing.marked import kill_marked, marked_pids, new_mark
from ub_dynamic.tuning_table import TuningRow, TuningTable

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--hidden", "64", "--ffn", "128")


@pytest.fixture(autouse=True)
def ranks_can_be_started() -> None:
    if (missing := mpi_missing()) is not None:
        pytest.skip(missing)


def command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ub_dynamic", *words]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(words), env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_one_operation_against_its_gemm(tmp_path: Path) -> None:
    path = tmp_path / "op.json"
    sizes = (*SMALL, "--tokens", "64", "--gemms", "fc1_fprop,fc2_dgrad", "--seconds", "1")
    done = run("bench", "op", *sizes, "--json", str(path))
    assert "async_tp: PyTorch's symmetric memory needs CUDA" in done.stdout
    result = json.loads(path.read_text())
    assert (result["mode"], result["name"]) == ("cpu-mpi", "op")
    assert [row["gemm"] for row in result["rows"]] == ["fc1_fprop", "fc2_dgrad"]
    for row in result["rows"]:
        assert min(row["default_us"], row["none_us"], row["plain_us"]) > 0
        assert row["rounds"] >= 6


def test_a_step_in_every_arm_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    picture = tmp_path / "steps.svg"
    words = ("--capacity", "128", "--tokens", "64", "--seconds", "2", "--json", str(path), "--plot", str(picture))
    run("bench", "tp-step", *SMALL, *words)
    assert picture.read_text().startswith("<?xml")
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    for arm in ("dynamic", "exact", "pad", "rebuild", "none", "unguarded", "auto"):
        assert row[f"{arm}_ms"] > 0
    assert row["rebuild_ms"] > row["exact_ms"]
    assert {"active_over_exact_max", "active_over_pad_excess_max"} <= set(result["figures"])
    file = tmp_path / "lengths.txt"
    file.write_text("30\n70\n20\n30\n")
    path = tmp_path / "lengths.json"
    words = ("--capacity", "128", "--file", str(file), "--seconds", "1", "--documents", "2")
    run("bench", "lengths", *SMALL, *words, "--json", str(path))
    (row,) = json.loads(path.read_text())["rows"]
    assert row["microbatches"] == 2
    assert row["token_ratio"] == 150 / 256


@pytest.mark.parametrize("arms", ["exact,rebuild", "dynamic,rebuild,pad", "exact,pad", "exact,dynamic"])
def test_arms_that_are_left_out_are_not_missed(tmp_path: Path, arms: str) -> None:
    path = tmp_path / "step.json"
    words = ("--capacity", "64", "--tokens", "32", "--seconds", "1", "--arms", arms, "--json", str(path))
    run("bench", "tp-step", *SMALL, *words)
    (row,) = json.loads(path.read_text())["rows"]
    assert all(row[f"{arm}_ms"] > 0 for arm in arms.split(","))


def test_an_operation_runs_at_the_t_that_is_valid_whatever_was_asked_for(tmp_path: Path) -> None:
    """At H = 32 a pipeline takes no T below 8, and there the table names another configuration than below."""
    none, pipeline = OverlapConfig("none"), OverlapConfig("pipeline", num_splits=4)
    rows = (TuningRow("fc2_fprop", 2, none, "so"), TuningRow("fc2_fprop", 8, pipeline, "so"))
    TuningTable(**header(2, 32, 64, "float32", "cpu-mpi"), rows=rows).save(tmp_path / "t.json")
    words = ("--hidden", "32", "--ffn", "64", "--tokens", "2,4,64", "--gemms", "fc2_fprop", "--seconds", "1")
    path = tmp_path / "op.json"
    run("bench", "op", *words, "--policy", str(tmp_path / "t.json"), "--json", str(path))
    found = json.loads(path.read_text())["rows"]
    assert [(row["tokens"], row["policy"]) for row in found] == [(64, str(pipeline)), (8, str(pipeline))]


def test_a_table_is_made_taken_up_again_and_used(tmp_path: Path) -> None:
    path, plot = tmp_path / "table.json", tmp_path / "curves.png"
    words = ("tune", *SMALL, "--tp", "2", "--tokens", "64:128", "--out", str(path), "--plot", str(plot))
    run(*words, "--gemms", "fc1_fprop,fc2_fprop", "--seconds", "4")
    table = TuningTable.load(path)
    assert [(row.gemm, row.tokens) for row in table.rows] == [
        (gemm, tokens) for gemm in ("fc1_fprop", "fc2_fprop") for tokens in (64, 128)
    ]
    assert all(row.candidates and row.gemm_us for row in table.rows)
    assert plot.stat().st_size > 10_000
    done = run(*words, "--gemms", "fc2_fprop,fc2_dgrad", "--seconds", "3")
    assert "4 measured cells already" in done.stdout
    again = TuningTable.load(path)
    assert set(table.rows) < set(again.rows)
    assert {row.gemm for row in again.rows} == {"fc1_fprop", "fc2_fprop", "fc2_dgrad"}
    # and initialize_ub takes it: the policy's arm runs, with what the table says
    result = tmp_path / "op.json"
    sizes = (*SMALL, "--tokens", "64", "--gemms", "fc2_fprop", "--seconds", "1", "--policy", str(path))
    run("bench", "op", *sizes, "--json", str(result))
    (row,) = json.loads(result.read_text())["rows"]
    chosen = next(row.chosen for row in again.rows if (row.gemm, row.tokens) == ("fc2_fprop", 64))
    assert row["policy"] == str(chosen)
    assert row["policy_us"] > 0 and row["over_best_peer"] > 0
    result = tmp_path / "step.json"
    sizes = (*SMALL, "--capacity", "128", "--tokens", "64", "--arms", "dynamic,policy", "--seconds", "1")
    run("bench", "tp-step", *sizes, "--policy", str(path), "--json", str(result))
    (row,) = json.loads(result.read_text())["rows"]
    assert f"fc2_fprop {chosen}" in row["policy"]
    assert row["policy_ms"] > 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_ranks_and_keeps_the_cells(tmp_path: Path, number: signal.Signals, status: int) -> None:
    path = tmp_path / "table.json"
    words = ("tune", *SMALL, "--tokens", "32:128", "--out", str(path), "--seconds", "200")
    mark = new_mark()
    process = subprocess.Popen(
        command(words),
        env={**environment(), **mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background job ignores
    )
    try:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, said
    assert "nothing is left running" in said and "Traceback" not in said
    assert not marked_pids(mark)
    assert TuningTable.load(path).rows


def test_a_signal_leaves_the_rows_of_a_bench(tmp_path: Path) -> None:
    result = tmp_path / "rows.json"
    words = ("bench", "op", *SMALL, "--tokens", "32:128", "--seconds", "48", "--json", str(result))
    mark = new_mark()
    process = subprocess.Popen(
        command(words),
        env={**environment(), **mark, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while not any('"row"' in path.read_text() for path in tmp_path.glob("*/events")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "nothing is left running" in said and "Traceback" not in said
    assert not marked_pids(mark)
    record = json.loads(result.read_text())
    assert record["rows"] and record["figures"]["failed_starts"] == 1
    assert all(row["gemm"] in shown for row in record["rows"])


@pytest.mark.parametrize("words", [("tune", "--out", "table.json"), ("bench", "op")], ids=["tune", "bench"])
def test_ranks_end_when_what_started_them_is_killed(tmp_path: Path, words: Sequence[str]) -> None:
    mark = new_mark()
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            command([*words, *SMALL, "--tokens", "32:128", "--seconds", "200"]),
            cwd=tmp_path,
            env={**environment(), **mark},
            stdout=said,
            stderr=said,
        )
    try:
        ranks: list[int] = []
        deadline = time.monotonic() + 120
        while len(ranks) < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
            ranks = [pid for pid in marked_pids(mark) if b"ub_dynamic.bench.rank" in command_line(pid)]
        process.kill()
        process.wait(60)
        assert len(ranks) >= 2, (tmp_path / "said").read_text()
        deadline = time.monotonic() + 60  # they would measure for 200 s
        while marked_pids(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not marked_pids(mark)
    finally:
        process.kill()
        kill_marked(mark)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ("tune", *SMALL, "--tokens", "64:64", "--out", str(tmp_path / "file" / "table.json"))
    done = subprocess.run(command(words), env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "table.json cannot be written" in done.stderr and "Traceback" not in done.stderr

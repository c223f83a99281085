# SPDX-License-Identifier: Apache-2.0
"""What the ranks say is read as they say it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ub_dynamic.bench import start
from ub_dynamic.errors import UBUnsupportedError
from ub_dynamic.testing.marked import kill_marked, marked_pids, new_mark

ROOT = Path(__file__).resolve().parents[2]
# A measurement that needs no GPU: a row of the first rank, then nothing for long.
RANK = """\
import json, os, time
if os.environ["RANK"] == "0":
    open(os.environ["UB_DYNAMIC_BENCH_EVENTS"], "a").write(json.dumps({"row": {"tp": 2, "a": 1}}) + "\\n")
time.sleep(120)
"""
FAILING = """\
import os, time
if os.environ["RANK"] == "1":
    print("x\\n" * 300)
    raise ValueError("why it failed")
time.sleep(60)
"""
# Ctrl-C as in a terminal: a shell's background job ignores it.
COMMAND = """\
import os, signal
from ub_dynamic.bench import start
from ub_dynamic.errors import UBUnsupportedError
from ub_dynamic.cli import measuring
signal.signal(signal.SIGINT, signal.default_int_handler)
start.PROGRAM = "one_row"
start.mode_of = measuring.mode_of = lambda backend, ranks: "one-gpu-2-ranks"
watched = measuring.Watched("bench", lambda row: os.write(2, b"a row\\n"))
ended = watched.run("op", {}, "te", 2, 100.0)
print("rows", ended.rows)
raise SystemExit(watched.exit_status)
"""


def test_of_a_rank_that_fails_under_torchrun_its_own_words_are_kept(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILING)
    status, said = start._launched([str(program)], "2-gpus", 2, 60.0, {})
    assert status == 1
    assert said.splitlines()[-1] == "ValueError: why it failed"
    assert f'File "{program}", line 4' in said
    for noise in ("torch/distributed", "Root Cause", "exitcode", "SIGTERM"):
        assert noise not in said
    assert said.count("x\n") == 199  # and the empty line that print adds


def test_events_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("")
    seen: list[Any] = []
    with start._Reader(path, seen.append) as reader, path.open("a") as file:
        file.write(json.dumps({"row": {"a": 1}}) + "\n" + '{"row": ')
        file.flush()
        file.write('{"a": 2}}\n{"ended in the mid')
    assert seen == [{"row": {"a": 1}}, {"row": {"a": 2}}] == reader.events


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_ranks_that_share_a_gpu_and_keeps_their_rows(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    (tmp_path / "one_row.py").write_text(RANK)
    mark = new_mark()
    environment = {**os.environ, **mark, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        while (line := process.stderr.readline()) != "a row\n":
            assert line, "it ended"
        process.send_signal(number)
        shown, said = process.communicate(timeout=60)
        assert not marked_pids(mark)
    finally:
        process.kill()
        kill_marked(mark)
    assert process.returncode == status, said
    assert "nothing is left running; rows that were measured: 1" in said and "Traceback" not in said
    assert "rows [{'tp': 2, 'a': 1}]" in shown


@pytest.mark.parametrize("ctrl_c", ["signal.default_int_handler", "signal.SIG_IGN"])
def test_a_row_that_cannot_be_kept_ends_the_ranks_at_once(tmp_path: Path, ctrl_c: str) -> None:
    (tmp_path / "one_row.py").write_text(RANK)
    mark = new_mark()
    environment = {**os.environ, **mark, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    failing = COMMAND.replace('lambda row: os.write(2, b"a row\\n")', "full").replace(
        "import os, signal",
        "import os, signal\nfrom ub_dynamic.errors import UBUnsupportedError\n"
        "def full(row): raise UBUnsupportedError('t.json cannot be written: No space left on device')",
    )
    failing = failing.replace("signal.default_int_handler", ctrl_c)
    assert "full)" in failing and ctrl_c in failing
    try:
        done = subprocess.run(
            [sys.executable, "-c", failing], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert not marked_pids(mark)
    finally:
        kill_marked(mark)
    _mode, said, *_, last = done.stderr.splitlines()
    assert said == "bench: t.json cannot be written: No space left on device"
    assert last == "typer.exceptions.Exit: 2"  # there is no command around it here


def test_an_mpirun_that_is_none_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UB_DYNAMIC_MPIRUN", "/nowhere/mpirun")
    with pytest.raises(UBUnsupportedError, match="UB_DYNAMIC_MPIRUN = '/nowhere/mpirun' is no program that can be run"):
        start.run({"bench": "op", "options": {}}, "host", 2, 20.0)

# SPDX-License-Identifier: Apache-2.0
"""What is neither a regular file nor a pipe is refused in one line, before it is read; pipes are read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_bench_input import TABLE, command

from ub_dynamic.advise import read_lengths
from ub_dynamic.backends.host import trace
from ub_dynamic.backends.host.trace import GEMM, Span
from ub_dynamic.errors import UBUnsupportedError
from ub_dynamic.tuning_table import TuningTable

DEVICE = "/dev/null"  # one that has an end


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths").write_text("12\n34\n")
    for suffix in ("txt", "jsonl", "parquet"):
        Path(f"link.{suffix}").symlink_to(DEVICE)


@pytest.mark.parametrize(
    "words",
    [
        *(f"advise {name} --capacity 64" for name in (DEVICE, "link.txt", "link.jsonl", "link.parquet")),
        f"advise lengths --capacity 64 --table {DEVICE}",
        f"trace {DEVICE}",
        f"bench lengths --file {DEVICE}",
        f"bench op --policy {DEVICE}",
    ],
)
def test_a_device_is_refused_in_one_line(words: str) -> None:
    result = command(*words.split())
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.exception
    (line,) = result.output.splitlines()
    assert "is no regular file and no pipe; name a file, or /dev/stdin behind a pipe" in line


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(UBUnsupportedError, match="is no regular file and no pipe"):
        TuningTable.load(tmp_path)


def test_pipes_are_read() -> None:
    trace.save(Path("trace.json"), [[Span(GEMM, "fc1_fprop", 0, 5000)]])
    readers = {
        "lengths": lambda path: [block.tolist() for block in read_lengths(path)],
        TABLE.save("table.json").name: TuningTable.load,
        "trace.json": trace.load,
    }
    os.mkfifo("pipe")
    for name, read in readers.items():
        whole = Path(name).read_bytes()
        writer = threading.Thread(target=Path("pipe").write_bytes, args=(whole,), daemon=True)
        writer.start()
        assert read(Path("pipe")) == read(Path(name))
        writer.join(60)


def test_standard_input_is_read() -> None:
    words = [sys.executable, "-m", "ub_dynamic", "advise", "/dev/stdin", "--capacity", "64"]
    done = subprocess.run(words, input="12\n34\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 documents, 46 tokens" in done.stdout


def test_a_name_that_cannot_be_asked_about_is_left_to_who_opens_it() -> None:
    with pytest.raises(UBUnsupportedError, match="the tuning table a+ cannot be read: .*too long"):
        TuningTable.load("a" * 300)

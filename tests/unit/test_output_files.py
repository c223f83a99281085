# SPDX-License-Identifier: Apache-2.0
"""A file that a command cannot write is refused in one line and left as it is; standard output too."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from test_bench_input import TABLE, Started, command

from ub_dynamic.backends.host import trace
from ub_dynamic.backends.host.trace import GEMM, Span
from ub_dynamic.bench import asked
from ub_dynamic.bench.start import Ended
from ub_dynamic.cli import measuring
from ub_dynamic.errors import UBUnsupportedError
from ub_dynamic.testing.results import write_result

LAYOUT = "layout --method ring_exchange --collective rs --capacity 64x64 --tp 2 --tokens 32"
PICTURES = {
    "advise": "advise lengths --capacity 64 --out",
    "layout": f"{LAYOUT} --out",
    "schedule": "schedule --pp 2 --microbatches 2 --out",
    "trace": "trace trace.json --out",
    "tune": "tune --out t.json --plot",
    "tp-step": "bench tp-step --plot",
}
ROW = {"kind": "step", "tp": 2, "layer": "MLP", "hidden": 256, "tokens": 64, "capacity_fraction": 0.5}
ROW |= {"dynamic_ms": 1.0, "pad_ms": 2.0}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*_: Any, **__: Any) -> Ended:
        raise Started

    monkeypatch.setattr(measuring, "run", run)
    monkeypatch.setattr(asked, "mode_of", lambda backend, ranks: "cpu-mpi")
    for module in ("measuring", "tune", "bench"):
        monkeypatch.setattr(f"ub_dynamic.cli.{module}.mode_of", asked.mode_of)
    monkeypatch.chdir(tmp_path)
    Path("lengths").write_text("12\n")
    trace.save(Path("trace.json"), [[Span(GEMM, "fc1_fprop", 0, 5)]])
    for suffix in ("svg", "json"):
        Path(f"folder.{suffix}").mkdir()
        os.mkfifo(f"pipe.{suffix}")
        Path(f"link.{suffix}").symlink_to("/dev/full")


def one_line(words: str, says: str) -> None:
    result = command(*words.split())
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("folder.svg", "is a folder"),
        ("pipe.svg", "is no regular file"),
        ("link.svg", "is no regular file"),
        ("/proc/x.svg", "/proc/x.svg cannot be written"),
        ("gone/x.svg", "there is no folder gone"),
    ],
)
@pytest.mark.parametrize("words", PICTURES.values(), ids=list(PICTURES))
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(words: str, name: str, says: str) -> None:
    one_line(f"{words} {name}", says)
    assert stat.S_ISFIFO(os.stat("pipe.svg").st_mode) and Path("link.svg").is_symlink()


@pytest.mark.parametrize("words", PICTURES.values(), ids=list(PICTURES))
def test_a_full_disk_is_one_line_after_what_was_found(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def run(job: Any, backend: Any, ranks: int, timeout_s: float, on_event: Any, **_: Any) -> Ended:
        event = {"row": TABLE.to_json()["rows"][0] if job["bench"] == "tune" else ROW}
        on_event(event)
        return Ended(0, (event,), "")

    monkeypatch.setattr(Figure, "savefig", full)
    monkeypatch.setattr(measuring, "run", run)
    result = command(*words.split(), "x.svg")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    *shown, last = result.output.splitlines()
    assert shown and "x.svg cannot be written: No space left on device" in last


@pytest.mark.parametrize("name", ["pipe.json", "link.json", "folder.json"])
@pytest.mark.parametrize("words", ["tune --restart --out", "tune --out", "bench op --json"])
def test_only_a_regular_file_is_replaced(words: str, name: str) -> None:
    before = os.stat(name)
    says = "folder" if name == "folder.json" else "is no regular file, and is left as it is"
    result = command(*words.split(), name)
    assert result.exit_code == 2 and not isinstance(result.exception, Started)
    assert says in result.output or "is a directory" in result.output
    assert os.stat(name) == before and Path("link.json").is_symlink()


def test_a_table_or_result_replaces_no_pipe(tmp_path: Path) -> None:
    with pytest.raises(UBUnsupportedError, match="no regular file"):
        TABLE.save("pipe.json")
    with pytest.raises(UBUnsupportedError, match="no regular file"):
        write_result("pipe", {}, mode="cpu-mpi", folder=tmp_path)
    assert stat.S_ISFIFO(os.stat("pipe.json").st_mode)


def test_a_link_to_a_regular_file_is_taken() -> None:
    Path("to.svg").symlink_to("there.svg")
    for _ in range(2):
        assert command(*LAYOUT.split(), "--out", "to.svg").exit_code == 0
    assert Path("there.svg").read_bytes().startswith(b"<?xml") and Path("to.svg").is_symlink()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["advise lengths --capacity 64", "advise lengths --capacity 64 --json", LAYOUT])
def test_a_full_standard_output_is_one_line(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ub_dynamic", *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "the output cannot be written: No space left on device" in line

# SPDX-License-Identifier: Apache-2.0
"""A file that a command cannot write is refused in one line and left as it is; standard output too."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from test_bench_input import TABLE, Started, command

from ub_dynamic.backends.host import trace
from ub_dynamic.backends.host.trace import GEMM, Span
from ub_dynamic.bench import asked
from ub_dynamic.bench.start import Ended
from ub_dynamic.bench.tuned import GrowingTable, header
from ub_dynamic.cli import measuring
from ub_dynamic.errors import UBUnsupportedError
from ub_dynamic.testing.results import write_result
from ub_dynamic.tuning_table import TuningTable

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


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, text: str) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    Path("t.json").write_text("old")
    before = sorted(os.listdir())
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UBUnsupportedError, match=r"t\.json cannot be written: No space left on device"):
        TABLE.save("t.json")
    with pytest.raises(UBUnsupportedError, match=r"t\.json cannot be written: No space left on device"):
        write_result("t", {}, mode="cpu-mpi", folder=tmp_path)
    assert sorted(os.listdir()) == before and Path("t.json").read_text() == "old"


def test_results_and_tables_are_written_through_links_and_to_long_names() -> None:
    Path("there").mkdir()
    for name in ("table.json", "kept.json"):
        Path("there", name).write_text("old")
        Path(name).symlink_to(f"there/{name}")
    TABLE.save("table.json")
    write_result("kept", {"a": 1}, mode="cpu-mpi", folder=Path())
    for name in ("table.json", "kept.json"):
        assert Path(name).is_symlink() and json.loads(Path("there", name).read_text())
    longest = f"{'t' * 250}.json"
    TABLE.save(longest)
    assert TuningTable.load(longest).rows == TABLE.rows


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("advise x.svg --capacity 64 --out x.svg", "--out: x.svg is the file of --lengths as well"),
        ("advise lengths --capacity 64 --table x.svg --out ./x.svg", "--out: x.svg is the file of --table as well"),
        ("trace x.svg --out x.svg", "--out: x.svg is the file of --file as well"),
        ("tune --out x.svg --plot x.svg", "--plot: x.svg is the file of --out as well"),
        ("bench op --policy t.json --json t.json", "--json: t.json is the file of --policy as well"),
        ("bench op --policy t.json --json same.json", "--json: same.json is the file of --policy as well"),
        ("bench tp-step --policy x.svg --plot x.svg", "--plot: x.svg is the file of --policy as well"),
        ("bench lengths --file t.json --json t.json", "--json: t.json is the file of --file as well"),
    ],
)
def test_one_file_is_not_read_and_written_or_written_twice(words: str, says: str) -> None:
    Path("x.svg").write_text("kept")
    TABLE.save("t.json")
    Path("same.json").symlink_to("t.json")
    one_line(words, says)
    assert Path("x.svg").read_text() == "kept" and TuningTable.load("t.json").rows == TABLE.rows


def test_a_table_is_filled_by_one_tune_at_a_time() -> None:
    facts = header(2, 256, 1024, "float32", "cpu-mpi")
    with GrowingTable(Path("t.json"), facts) as growing:
        growing.take(TABLE.to_json()["rows"][0])
        one_line("tune --out t.json", "t.json is being filled by another tune")
        Path("again.json").symlink_to("t.json")
        one_line("tune --out again.json", "again.json is being filled by another tune")
        GrowingTable(Path("other.json"), facts).__exit__()
    before = sorted(os.listdir())
    for wrong in (facts, {**facts, "hidden": 512}):  # it is let go of after an error, too
        with suppress(UBUnsupportedError), GrowingTable(Path("t.json"), wrong):
            pass
    assert sorted(os.listdir()) == before and not [name for name in before if name.endswith(".lock")]


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

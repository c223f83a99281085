# SPDX-License-Identifier: Apache-2.0
"""examples/train_packed.py, started as a user starts it, but tiny: its modes agree, its summary adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ub_dynamic.testing.launch import Launcher, RankResult, run_ranks

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "train_packed.py"
TINY = ["--steps", "3", "--documents", "3", "--max-document", "512", "--hidden", "64", "--layers", "1"]

pytestmark = pytest.mark.mpi


def start(folder: Path, ranks: int, *flags: str, launcher: Launcher = "mpirun") -> RankResult:
    return run_ranks(PROGRAM, ranks, [*TINY, "--out", str(folder), *flags], launcher=launcher, timeout=120)


def summary(folder: Path, ranks: int, *flags: str, launcher: Launcher = "mpirun") -> dict[str, Any]:
    start(folder, ranks, *flags, launcher=launcher).check()
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return result


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Every mode at tp 2, with picture and trace."""
    folder = tmp_path_factory.mktemp("compared")
    return folder, summary(folder, 2, "--trace", str(folder / "trace.json"))


def test_dynamic_gives_the_losses_of_pad_and_the_bits_of_rebuild(
    compared: tuple[Path, dict[str, Any]],
) -> None:
    modes = compared[1]["modes"]
    assert modes["dynamic"]["losses"] == modes["rebuild"]["losses"]
    assert modes["dynamic"]["losses"] == pytest.approx(modes["pad"]["losses"], rel=1e-5)
    assert modes["dynamic"]["loss_last"] < modes["dynamic"]["loss_first"]


def test_only_rebuild_allocates_and_only_dynamic_changes_the_shape(
    compared: tuple[Path, dict[str, Any]],
) -> None:
    modes = compared[1]["modes"]
    allocations = {name: mode["allocations_after_start"] for name, mode in modes.items()}
    assert allocations["dynamic"] == allocations["pad"] == 0 < allocations["rebuild"]
    changes = {name: mode["shape_changes"] for name, mode in modes.items()}
    assert changes["pad"] == changes["rebuild"] == 0 < changes["dynamic"]


def test_summary_adds_up(compared: tuple[Path, dict[str, Any]]) -> None:
    job = compared[1]
    assert (job["tp"], job["transport"], job["microbatches"], job["documents"]) == (2, "MPI", 6, 18)
    for name, mode in job["modes"].items():
        rows = [row for row in job["rows"] if row["mode"] == name]
        assert len(rows) == job["microbatches"]
        assert sum(row["tokens"] for row in rows) == mode["tokens"]
        assert sum(row["real_tokens"] for row in rows) == mode["real_tokens"] <= mode["tokens"]
        assert mode["padded_tokens"] == job["capacity"] * job["microbatches"]
        assert mode["saved_token_fraction"] == pytest.approx(1 - mode["tokens"] / mode["padded_tokens"])
        assert 0 <= mode["hidden_transfer_fraction"] <= 1
        assert len(mode["losses"]) == 3
    tokens = [row["tokens"] for row in job["rows"] if row["mode"] == "dynamic"]
    assert max(tokens) == job["capacity"], "the capacity is the largest T that occurs"
    assert len(set(tokens)) > 1
    assert {row["tokens"] for row in job["rows"] if row["mode"] == "pad"} == {job["capacity"]}


def test_picture_and_trace(compared: tuple[Path, dict[str, Any]]) -> None:
    folder = compared[0]
    assert (folder / "tokens.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"GEMM", "transfer"}


def test_losses_do_not_depend_on_tp_or_launcher(tmp_path: Path, compared: tuple[Path, dict[str, Any]]) -> None:
    flags = ("--mode", "dynamic", "--no-plot")
    expected = compared[1]["modes"]["dynamic"]["losses"]
    by_torchrun = summary(tmp_path / "torchrun", 2, *flags, launcher="torchrun")
    assert by_torchrun["transport"] == "gloo"
    assert by_torchrun["modes"]["dynamic"]["losses"] == pytest.approx(expected, rel=1e-6)
    alone = summary(tmp_path / "alone", 1, *flags)["modes"]["dynamic"]["losses"]
    # tp decides how T is rounded up, which adds rows but no targets, and in which order sums are taken.
    assert alone == pytest.approx(expected, rel=1e-4)


def test_a_wrong_setting_is_refused_once_for_all_ranks(tmp_path: Path) -> None:
    result = start(tmp_path, 2, "--heads", "3", "--hidden", "96")
    assert result.returncode == 2
    assert result.stderr.count("--heads 3 cannot be divided among 2 ranks; the next valid value is 4") == 1
    assert "Traceback" not in result.stderr

# SPDX-License-Identifier: Apache-2.0
"""One rank does something wrong: every other rank ends with an error that says what, and nothing stays behind."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ub_dynamic.testing.launch import Launcher, RankResult, find_mpirun, mpi_flavor, start_ranks
from ub_dynamic.testing.marked import marked_pids, shared_files

PROGRAM = Path(__file__).with_name("host_faults.py")
LIMIT_S = 90  # for start, fault and end on a loaded machine; the wait itself is bounded by UB_DYNAMIC_TIMEOUT


def provoke(
    fault: str, size: int, folder: Path, launcher: Launcher = "mpirun", timeout: float = 10
) -> tuple[RankResult, dict[int, dict[str, Any]]]:
    """How the run ended, and what each rank saw."""
    env = {"UB_DYNAMIC_TIMEOUT": str(timeout)}
    used: set[str] = set()  # files in shared memory that some process of the run has had
    deadline = time.monotonic() + LIMIT_S
    with start_ranks(PROGRAM, size, [fault, str(folder)], launcher=launcher, env=env) as run:
        while run.running and time.monotonic() < deadline:
            used |= shared_files(marked_pids(run.mark))
            time.sleep(0.1)
        result = run.wait(max(1.0, deadline - time.monotonic()))
    assert not result.timed_out, result.stderr[-2000:]
    assert not result.leftover
    assert not [path for path in used if Path(path).exists()]
    seen = {int(file.stem.removeprefix("rank")): json.loads(file.read_text()) for file in folder.glob("rank*.json")}
    return result, seen


@pytest.mark.mpi
@pytest.mark.parametrize(("launcher", "size"), [("mpirun", 2), ("mpirun", 4), ("torchrun", 2)])
def test_killed_rank_is_named_by_all_others(launcher: Launcher, size: int, tmp_path: Path) -> None:
    if launcher == "mpirun" and mpi_flavor(find_mpirun()) == "openmpi":
        pytest.skip("Open MPI's launcher loses its connection to the killed rank and ends the run itself")
    result, seen = provoke("killed-unnoticed", size, tmp_path, launcher)
    assert result.returncode != 0
    assert sorted(seen) == [rank for rank in range(size) if rank != 1]
    for rank, what in seen.items():
        assert what["error"] == "UBTimeoutError", what
        assert f"rank {rank}, ring all-gather on qkv_fprop, chunk" in what["text"]
        assert re.search(r"the process of rank\(s\) \[1\] has ended|rank\(s\) \[[\d, ]+\] gave up", what["text"])
    assert any("the process of rank(s) [1] has ended" in what["text"] for what in seen.values())


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_killed_rank_ends_the_run(launcher: Launcher, tmp_path: Path) -> None:
    result, _ = provoke("killed", 3 if launcher == "torchrun" else 4, tmp_path, launcher)
    assert result.returncode != 0 or (launcher == "mpirun" and mpi_flavor(find_mpirun()) == "openmpi")


@pytest.mark.mpi
def test_a_wait_for_a_stopped_rank_ends(tmp_path: Path) -> None:
    _, seen = provoke("stopped", 2, tmp_path, timeout=2)
    assert seen[0]["error"] == "UBTimeoutError"
    assert "ring all-gather on qkv_fprop" in seen[0]["text"]
    assert "from rank(s) [1]" in seen[0]["text"]


@pytest.mark.mpi
@pytest.mark.parametrize(("fault", "size"), [("other-T", 4), ("other-T-unchecked", 2)])
def test_another_T_is_named_on_every_rank(fault: str, size: int, tmp_path: Path) -> None:
    result, seen = provoke(fault, size, tmp_path)
    assert result.returncode != 0
    assert sorted(seen) == list(range(size))
    for what in seen.values():
        assert what["error"] == "UBRankMismatchError", what
        for rank in range(size):
            tokens = (2040 if rank == 1 else 1024) * size
            assert re.search(rf"rank {rank}: (fc1_fprop with )?T = {tokens}\b", what["text"]), what


@pytest.mark.mpi
def test_another_T_over_gloo(tmp_path: Path) -> None:
    _, seen = provoke("other-T-unchecked", 2, tmp_path, "torchrun")
    assert {what["error"] for what in seen.values()} == {"UBRankMismatchError"}
    for what in seen.values():
        assert "rank 0: fc1_fprop with T = 2048" in what["text"]
        assert "rank 1: fc1_fprop with T = 4080" in what["text"]


@pytest.mark.mpi
def test_a_skipped_change_of_shape_is_found(tmp_path: Path) -> None:
    _, seen = provoke("skip-shape", 2, tmp_path)
    assert {what["error"] for what in seen.values()} == {"UBRankMismatchError"}, seen
    assert all("a rank skipped a call" in what["text"] for what in seen.values())


@pytest.mark.mpi
def test_another_gemm_is_found_where_nothing_overlaps(tmp_path: Path) -> None:
    _, seen = provoke("other-gemm", 2, tmp_path)
    assert {what["error"] for what in seen.values()} == {"UBRankMismatchError"}, seen
    for what in seen.values():
        # Whichever rank looks second may also read that the other "gave up".
        assert "rank 0: fc1_fprop with T = 4096" in what["text"]
        assert "rank 1: fc2_fprop with T = 4096" in what["text"]


@pytest.mark.mpi
def test_a_skipped_operation_is_found(tmp_path: Path) -> None:
    _, seen = provoke("skip-operation", 2, tmp_path)
    assert {what["error"] for what in seen.values()} == {"UBRankMismatchError"}, seen
    for what in seen.values():
        assert "rank 1: fc1_fprop" in what["text"]
        assert "rank 0: qkv_fprop" in what["text"]


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_skipped_last_operation_is_found(launcher: Launcher, tmp_path: Path) -> None:
    _, seen = provoke("skip-last-operation", 2, tmp_path, launcher, timeout=2)
    # Rank 1 goes on to destroy_ub: rank 0 names it as late, or as being there already, whichever it sees first.
    error, text = seen[0]["error"], seen[0]["text"]
    if error == "UBTimeoutError":
        assert "ranks that have not come: [1]" in text
        assert "rank 0: qkv_fprop with T = 4096 (operation 4)" in text
        assert "rank 1: qkv_fprop with T = 4096 (operation 3)" in text
    else:
        assert error == "UBRankMismatchError"
        assert "overlap operation 4: rank 0: qkv_fprop with T = 4096; rank 1: destroy_ub" in text


@pytest.mark.mpi
@pytest.mark.parametrize("fault", ["raises", "caught"])
def test_an_exception_on_one_rank_ends_all(fault: str, tmp_path: Path) -> None:
    result, seen = provoke(fault, 2, tmp_path)
    assert result.returncode != 0
    assert seen[1]["error"] == "ValueError"
    assert seen[0]["error"] == "UBTimeoutError"
    assert "rank(s) [1] gave up" in seen[0]["text"]
    if fault == "raises":
        assert "ValueError: a mistake in the middle of a ring" in result.stderr
        assert "UBTimeoutError" in result.stderr

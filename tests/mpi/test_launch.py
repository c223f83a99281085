# SPDX-License-Identifier: Apache-2.0
"""The launcher and the plugin: how a failing, hanging or killed rank looks, and that nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ub_dynamic.testing.launch import run_ranks, start_ranks
from ub_dynamic.testing.marked import marked_pids

RANKS = """
import os, signal, sys, time
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
"""


def program(folder: Path, body: str) -> Path:
    path = folder / "program.py"
    path.write_text(RANKS + body)
    return path


@pytest.mark.mpi
def test_output_and_arguments(tmp_path: Path) -> None:
    body = "from mpi4py.MPI import COMM_WORLD as c\nsys.stdout.write(f'{c.rank} {c.size} {sys.argv[1]}\\n')"
    result = run_ranks(program(tmp_path, body), 2, ["x"], env={"OMP_NUM_THREADS": "1"}).check()
    assert sorted(result.stdout.split("\n"))[1:] == ["0 2 x", "1 2 x"]


@pytest.mark.mpi
def test_torchrun(tmp_path: Path) -> None:
    file = program(tmp_path, "sys.stdout.write(f'{rank} {os.environ[\"WORLD_SIZE\"]}\\n')")
    result = run_ranks(file, 2, launcher="torchrun").check()
    assert sorted(result.stdout.split("\n"))[1:] == ["0 2", "1 2"]


@pytest.mark.mpi
def test_timeout_ends_every_process(tmp_path: Path) -> None:
    body = "print('up', flush=True)\ntime.sleep(600)"
    with start_ranks(program(tmp_path, body), 2) as run:
        result = run.wait(2.0)
        assert result.timed_out
        assert not marked_pids(run.mark)
    with pytest.raises(AssertionError, match=r"(?s)timed out after 2 s.*up"):
        result.check()


SURVIVES = """
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
print("survived", flush=True)
os._exit(0)
"""

LEAVES = """
import subprocess
nowhere = subprocess.DEVNULL
subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=nowhere, stderr=nowhere)
"""


@pytest.mark.mpi
def test_the_launcher_ends_the_others_when_a_rank_is_killed(tmp_path: Path) -> None:
    ended = run_ranks(program(tmp_path, SURVIVES), 2)
    assert ended.returncode != 0
    assert "survived" not in ended.stdout


@pytest.mark.mpi
def test_leftover_processes_are_named_and_ended(tmp_path: Path) -> None:
    result = run_ranks(program(tmp_path, LEAVES), 2, timeout=20)
    assert len(result.leftover) == 2
    for pid in result.leftover:
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


CASES = """
import os, signal, time
import pytest

@pytest.mark.mpi(2)
def test_passes(mpi_comm, mpi_size, ranks_tmp_path):
    assert mpi_comm.allreduce(1) == mpi_size
    (ranks_tmp_path / str(mpi_comm.rank)).touch()
    mpi_comm.barrier()
    assert len(list(ranks_tmp_path.iterdir())) == mpi_size

@pytest.mark.mpi(2)
def test_fails_on_one(mpi_comm):
    assert mpi_comm.rank == 0

@pytest.mark.mpi(2, timeout=2)
def test_hangs_on_one(mpi_comm):
    time.sleep(600 * mpi_comm.rank)

@pytest.mark.mpi(2)
def test_dies_on_one(mpi_comm):
    if mpi_comm.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    mpi_comm.barrier()

@pytest.mark.mpi(2)
def test_skips(mpi_comm):
    pytest.skip("a reason")

@pytest.mark.mpi(2)
def test_after_all(mpi_comm):
    mpi_comm.barrier()
"""


@pytest.mark.mpi
def test_every_way_to_fail_is_reported(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["ub_dynamic.testing.mpi_plugin"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = mpi\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "test_cases.py"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    text = done.stdout
    assert "3 failed, 2 passed, 1 skipped" in text, text + done.stderr
    assert "rank 0: ended\nrank 1: failed" in text
    assert "assert 1 == 0" in text
    assert "rank 0: ended\nrank 1: not ended after 2 s" in text
    assert "in test_hangs_on_one" in text  # where the rank stood
    assert "rank 1: not ended, the launcher has" in text
    assert "a reason" in text

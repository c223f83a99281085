# SPDX-License-Identifier: Apache-2.0
"""A rank of a pipeline that is killed: the others end in time, each with an error that names a rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ub_dynamic.testing.launch import launch_env

RANK = """
import os, signal
import torch, torch.distributed as dist
from ub_dynamic.errors import UBDynamicError
from ub_dynamic.pipeline import PipelineRunner, PipelineTransport

dist.init_process_group("gloo")
rank = dist.get_rank()
transport = PipelineTransport(capacity=(8, 4), dtype=torch.float32, timeout_s=5)
weight = torch.ones(4, requires_grad=True)

def chunk(hidden, blocks, tokens):
    if rank == 1 and tokens == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    x = (torch.ones(tokens, 4) if hidden is None else hidden) * weight
    return (x.sum() if rank == 3 else x), ()

runner = PipelineRunner([chunk], transport)
try:
    runner.step([3, 8, 5, 2, 4, 6])
except UBDynamicError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(7)
os._exit(0)
"""


@pytest.mark.mpi
def test_a_killed_rank(tmp_path: Path) -> None:
    """No launcher ends the others here: they find out by themselves."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, **launch_env("torchrun"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**common, "RANK": str(rank), "WORLD_SIZE": "4"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [process.communicate(timeout=90)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [7, -signal.SIGKILL, 7, 7], said
    for neighbour in (0, 2):
        assert "UBTimeoutError" in said[neighbour]
        assert "rank 1" in said[neighbour]
    assert "rank 2" in said[3]

# SPDX-License-Identifier: Apache-2.0
"""Rank discovery from each launcher's variables."""

from __future__ import annotations

import pytest

from ub_dynamic.errors import UBStateError
from ub_dynamic.ranks import Launch, discover


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, Launch(0, 1, 0, "single")),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Launch(3, 8, 1, "torchrun")),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            Launch(1, 4, 0, "openmpi"),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2"}, Launch(2, 4, 2, "mpich")),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}, Launch(5, 16, 1, "slurm")),
        # a shell inside a Slurm allocation, where mpirun or torchrun starts the ranks
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "PMI_RANK": "1", "PMI_SIZE": "2"},
            Launch(1, 2, 1, "mpich"),
        ),
        ({"RANK": "1"}, Launch(0, 1, 0, "single")),
    ],
)
def test_discovery(environ: dict[str, str], launch: Launch) -> None:
    assert discover(environ) == launch
    assert launch.uses_mpi == (launch.launcher in ("openmpi", "mpich"))


def test_contradictions_are_named() -> None:
    with pytest.raises(UBStateError, match="RANK = 4.*WORLD_SIZE = 4"):
        discover({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(UBStateError, match="PMI_RANK"):
        discover({"PMI_RANK": "one", "PMI_SIZE": "4"})

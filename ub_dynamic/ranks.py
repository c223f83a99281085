# SPDX-License-Identifier: Apache-2.0
"""Who am I: rank, world size and launcher, read from the environment in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import UBStateError

Launcher = Literal["torchrun", "openmpi", "mpich", "slurm", "single"]

# rank, world size and local rank as each launcher names them; the first that is complete wins. A shell of an
# allocation has Slurm's variables even if mpirun or torchrun starts the ranks, so Slurm comes last.
_VARIABLES: tuple[tuple[Launcher, str, str, str], ...] = (
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Launch:
    """How this process was started. ``launcher`` says which variables told it."""

    rank: int
    world_size: int
    local_rank: int
    launcher: Launcher

    @property
    def uses_mpi(self) -> bool:
        """Whether an MPI launcher started the ranks, so that MPI's world is the world."""
        return self.launcher in ("openmpi", "mpich")


def discover(environ: Mapping[str, str] | None = None) -> Launch:
    """The launch of this process; a process that nobody launched is rank 0 of 1.

    Raises :class:`UBStateError` where the launcher's variables contradict each other.
    """
    env = os.environ if environ is None else environ
    for launcher, rank_name, size_name, local_name in _VARIABLES:
        if rank_name not in env or size_name not in env:
            continue
        try:
            rank, size = int(env[rank_name]), int(env[size_name])
            local_rank = int(env.get(local_name, rank))
        except ValueError as error:
            raise UBStateError(f"{rank_name}, {size_name} or {local_name} is not a number: {error}") from error
        if not 0 <= rank < size:
            raise UBStateError(f"{rank_name} = {rank} is not a rank of {size_name} = {size}")
        return Launch(rank, size, local_rank, launcher)
    return Launch(0, 1, 0, "single")

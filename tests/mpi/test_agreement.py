# SPDX-License-Identifier: Apache-2.0
"""The TP group that a caller gives where TE makes its own: the same ranks, whoever numbers them, or all are told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ub_dynamic.agreement import agree
from ub_dynamic.errors import UBRankMismatchError, UBUnsupportedError
from ub_dynamic.groups import tensor_parallel_group

OPTIONS = {"dtype": torch.bfloat16, "ub_cfgs": None, "check": "deferred", "timeout": None, "auto": False}


@pytest.fixture
def numbered_backwards(mpi_comm: Any) -> Iterator[None]:
    """A world of torch.distributed in which MPI's last rank is the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = mpi_comm.bcast(f"tcp://127.0.0.1:{free.getsockname()[1]}", root=mpi_comm.Get_size() - 1)
    rank = mpi_comm.Get_size() - 1 - mpi_comm.Get_rank()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=mpi_comm.Get_size())
    yield
    dist.destroy_process_group()


@pytest.mark.mpi(4)
def test_a_communicator_of_mpi_is_read_in_the_numbers_of_torch(mpi_comm: Any, numbered_backwards: None) -> None:
    group, rank = tensor_parallel_group(2, None, "gloo"), dist.get_rank()
    right, wrong = mpi_comm.Split(rank // 2, rank), mpi_comm.Split(rank // 2, -rank)
    assert agree(group, [64, 64], 2, True, OPTIONS, None, right) == ((64, 64), None)
    with pytest.raises(UBUnsupportedError, match="of MPI's world, but TE's UserBuffers take contiguous ranks of torch"):
        agree(group, [64, 64], 2, True, OPTIONS, None, wrong)
    group.close()


@pytest.mark.mpi(4)
def test_a_rank_that_is_refused_tells_the_other(mpi_comm: Any, numbered_backwards: None) -> None:
    group, rank = tensor_parallel_group(2, None, "gloo"), dist.get_rank()
    wrong = mpi_comm.Split(rank // 2, -rank)
    if rank % 2:
        with pytest.raises(UBRankMismatchError, match=f"refused on rank {rank - 1}: tp_group has the ranks"):
            agree(group, [64, 64], 2, True, OPTIONS, None, None)
    else:
        with pytest.raises(UBUnsupportedError, match="tp_group has the ranks"):
            agree(group, [64, 64], 2, True, OPTIONS, None, wrong)
    group.close()

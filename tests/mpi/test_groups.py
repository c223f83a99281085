# SPDX-License-Identifier: Apache-2.0
"""TP groups between real processes: who belongs to whom, and that a wait names who is missing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from mpi4py import MPI

from ub_dynamic import groups
from ub_dynamic.board import RankBoard
from ub_dynamic.errors import UBRankMismatchError, UBShapeError, UBStateError, UBTimeoutError, UBUnsupportedError
from ub_dynamic.groups import MPIGroup, TorchGroup, tensor_parallel_group


@pytest.mark.mpi(4)
def test_contiguous_ranks_make_a_group(mpi_comm: Any) -> None:
    group = tensor_parallel_group(2)
    rank = mpi_comm.Get_rank()
    assert isinstance(group, MPIGroup)
    assert group.members == ((0, 1) if rank < 2 else (2, 3)) and group.members[group.rank] == rank
    assert group.allgather({"rank": rank}, "a test") == [{"rank": member} for member in group.members]
    group.barrier("a test")


@pytest.mark.mpi(4)
def test_a_group_of_ones_own(mpi_comm: Any) -> None:
    odd_and_even = mpi_comm.Split(mpi_comm.Get_rank() % 2)
    assert tensor_parallel_group(2, odd_and_even).size == 2
    with pytest.raises(UBShapeError, match="tp_group has 2 ranks, but tp_size is 4"):
        tensor_parallel_group(4, odd_and_even)
    odd_and_even.Free()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("tp_size", [3, 8, 0])
def test_a_world_that_cannot_be_cut(tp_size: int, mpi_comm: Any) -> None:
    with pytest.raises(UBShapeError, match=f"world of 4 rank.*tp_size = {tp_size}"):
        tensor_parallel_group(tp_size)


@pytest.mark.mpi(2)
def test_ranks_with_different_sizes_all_learn_it(mpi_comm: Any) -> None:
    for sizes in ((2, 1), (2, 3)):
        with pytest.raises(UBRankMismatchError, match=f"rank 0: tp_size = 2; rank 1: tp_size = {sizes[1]}"):
            tensor_parallel_group(sizes[mpi_comm.Get_rank()])


@pytest.mark.mpi(2, launcher="torchrun")
def test_ranks_of_torchrun_with_different_sizes_all_learn_it() -> None:
    tensor_parallel_group(2).close()
    with pytest.raises(UBRankMismatchError, match="rank 0: tp_size = 2; rank 1: tp_size = 1"):
        tensor_parallel_group(2 - dist.get_rank())


@pytest.mark.mpi(2)
def test_a_bootstrap_that_is_not_there(mpi_comm: Any) -> None:
    with pytest.raises(UBUnsupportedError, match="bootstrap_backend = 'ucx': it is one of mpi, gloo, nccl, or None"):
        tensor_parallel_group(2, bootstrap_backend="ucx")
    for name in ("gloo", "nccl"):
        with pytest.raises(UBStateError, match=f"bootstrap_backend = '{name}': an MPI launcher started the ranks"):
            tensor_parallel_group(2, bootstrap_backend=name)
    assert not dist.is_initialized()


@pytest.mark.mpi(2)
def test_groups_that_were_made_here_are_freed(mpi_comm: Any) -> None:
    for _ in range(3000):  # MPICH has about 2,000 communicators
        tensor_parallel_group(2).close()
    kept = tensor_parallel_group(2, mpi_comm)
    kept.close()
    mpi_comm.Barrier()


@pytest.mark.mpi(2)
def test_a_wait_names_the_missing_rank(mpi_comm: Any) -> None:
    group = MPIGroup(mpi_comm, members=(6, 7), timeout_s=0.3)
    if mpi_comm.Get_rank() == 0:
        with pytest.raises(UBTimeoutError, match="rank 6 waited 0.3 s for rank 7 in a test of waiting"):
            group.barrier("a test of waiting")


@pytest.mark.mpi(2)
def test_a_rank_that_never_makes_a_group_is_named(mpi_comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "setup_timeout_s", lambda: 0.3)
    if mpi_comm.Get_rank() == 0:
        with pytest.raises(
            UBTimeoutError, match="rank 0 waited 0.3 s for rank 1 in comparing tp_size in initialize_ub"
        ):
            tensor_parallel_group(2)
    else:  # what rank 0 said meanwhile would be taken for its next word
        assert MPI.COMM_WORLD.recv(source=0, tag=groups._TAG) == 2
    mpi_comm.Barrier()
    tensor_parallel_group(2).close()


@pytest.mark.mpi(2, launcher="torchrun")
def test_torchrun_makes_a_gloo_group() -> None:
    group = tensor_parallel_group(2)
    assert isinstance(group, TorchGroup) and dist.get_backend(group.process_group) == "gloo"
    assert group.allgather(group.rank, "a test") == [0, 1]
    assert group.members == (0, 1)


@pytest.mark.mpi(2, 4)
def test_the_board_between_processes(mpi_comm: Any) -> None:
    board = RankBoard(MPIGroup(mpi_comm))
    for change in range(1, 200):
        board.publish(change * 8)
        board.check()
    board.wait_for_all(20)
    assert board.dead_ranks() == []
    mpi_comm.Barrier()
    board.publish(8 if mpi_comm.Get_rank() else 16)
    mpi_comm.Barrier()
    everyone = "; ".join(["rank 0: T = 16", *(f"rank {rank}: T = 8" for rank in range(1, mpi_comm.Get_size()))])
    for look in (board.check, lambda: board.wait_for_all(20), board.final_check):
        with pytest.raises(UBRankMismatchError, match=everyone):
            look()


@pytest.mark.mpi(2)
def test_the_board_between_processes_never_waits(mpi_comm: Any) -> None:
    board = RankBoard(MPIGroup(mpi_comm))
    if mpi_comm.Get_rank() == 0:
        for change in range(1, 100):
            board.publish(change)
            board.check()
    time.sleep(0.01)
    mpi_comm.Barrier()
    if mpi_comm.Get_rank() == 1:
        for change in range(1, 100):
            board.publish(change)
            board.check()
    board.final_check()

# SPDX-License-Identifier: Apache-2.0
"""What one rank is refused with, or fails with, reaches the others, and leaves them as they were."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from host_world import HIDDEN, data, started

import ub_dynamic as ubd
from ub_dynamic.backends.host import get_ub
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice, Policy


@pytest.mark.mpi(2)
def test_ranks_with_other_policies_are_told(mpi_comm: Any) -> None:
    rank = mpi_comm.Get_rank()
    policies = [Policy((1,), ({"fc2_fprop": Choice(OverlapConfig("pipeline", num_splits=n), "")},)) for n in (2, 4)]
    where = "policies differ: fc2_fprop at T >= 1: "
    for mine, differ in (
        (policies[rank], f"{where}pipeline num_splits=2 on rank 0, pipeline num_splits=4 on rank 1"),
        (policies[0] if rank else None, f"{where}as configured on rank 0, pipeline num_splits=2 on rank 1"),
    ):
        words = f"different arguments: rank 0: .*; rank 1: .*policy = '.*{differ}"
        with pytest.raises(ubd.UBRankMismatchError, match=words):
            ubd.initialize_ub([64, HIDDEN], 2, dtype=torch.float32, backend="host", tp_group=mpi_comm, policy=mine)
    bad = Policy((1,), ({"fc2_fprop": Choice(OverlapConfig("bulk"), "")},))
    with pytest.raises(ubd.UBDynamicError, match="fc2_fprop has no method 'bulk'") as raised:
        ubd.initialize_ub(
            [64, HIDDEN], 2, dtype=torch.float32, backend="host", tp_group=mpi_comm, policy=bad if rank else "always"
        )
    assert type(raised.value) is (ubd.UBUnsupportedError if rank else ubd.UBRankMismatchError)
    assert not ubd.is_ub_initialized()


@pytest.mark.mpi(2)
def test_a_callable_that_ends_its_rank_tells_the_other_at_once(mpi_comm: Any) -> None:
    def choose(gemm: str, tokens: int) -> OverlapConfig | None:
        raise SystemExit(3)

    begin = time.monotonic()
    policy = choose if mpi_comm.Get_rank() else "always"
    with pytest.raises((SystemExit, ubd.UBRankMismatchError)) as raised:
        ubd.initialize_ub([64, HIDDEN], 2, dtype=torch.float32, backend="host", tp_group=mpi_comm, policy=policy)
    assert raised.type is (SystemExit if mpi_comm.Get_rank() else ubd.UBRankMismatchError)
    assert raised.type is SystemExit or "refused on rank 1: SystemExit: 3" in str(raised.value)
    assert time.monotonic() - begin < 30  # not after the wait for a missing rank, which takes 60 s
    assert not ubd.is_ub_initialized()


@pytest.mark.mpi(2)
def test_named_changes_are_compared_too(mpi_comm: Any) -> None:
    rank = mpi_comm.Get_rank()
    ubd.initialize_ub([64, HIDDEN], 2, dtype=torch.float32, backend="host", tp_group=mpi_comm, check="strict")
    ubd.set_buffer_active_shape("fc1_fprop", [16, HIDDEN])
    with ubd.active_shape([32, HIDDEN]):
        assert ubd.get_buffer_active_shape("fc1_fprop") == (32, HIDDEN)
    assert ubd.get_buffer_active_shape("fc1_fprop") == (16, HIDDEN)
    with pytest.raises(ubd.UBRankMismatchError, match="rank 0: T = 8 of fc1_fprop; rank 1: T = 8 of fc2_fprop"):
        ubd.set_buffer_active_shape("fc2_fprop" if rank else "fc1_fprop", [8, HIDDEN])
    assert ubd.get_buffer_active_shape("fc1_fprop") == (16, HIDDEN)
    with pytest.raises(ubd.UBRankMismatchError):
        ubd.destroy_ub()


@pytest.mark.mpi(2)
def test_what_fails_first_is_what_is_raised(mpi_comm: Any) -> None:
    """An error in the block is the one to see; no buffer waits for its overlap after it, and the shape is restored."""

    def fail_over_a_filled_buffer() -> None:
        with ubd.microbatch(16):
            get_ub("fc1_fprop").copy_into_buffer(data(8), local_chunk=True)
            raise ZeroDivisionError

    with started(mpi_comm):
        with pytest.raises(ZeroDivisionError):
            fail_over_a_filled_buffer()
        assert ubd.get_ub_active_shape() == ubd.get_ub_capacity_shape()
        ubd.set_ub_active_shape([16, HIDDEN])
        get_ub("fc1_fprop").copy_into_buffer(data(8), local_chunk=True)
        with get_ub("fc1_fprop").all_gather():
            pass
        ubd.reset_ub_active_shape()

# SPDX-License-Identifier: Apache-2.0
"""Ranks that initialise differently, or repeat a shape that others change, are told at once what differs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import ub_dynamic as ub


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"shape": [64, 64]}, {"shape": [64, 128]}),
        ({"dtype": torch.float32}, {"dtype": torch.bfloat16}),
        ({"ub_cfgs": None}, {"ub_cfgs": {"fc2_fprop": {"method": "ring_exchange"}}}),
        ({"check": "deferred"}, {"check": "never"}),
    ],
)
def test_other_arguments_are_named_on_both_ranks(ours: dict[str, Any], theirs: dict[str, Any], mpi_comm: Any) -> None:
    arguments = {"shape": [64, 64], "dtype": torch.float32, **(theirs if mpi_comm.Get_rank() else ours)}
    with pytest.raises(ub.UBRankMismatchError, match="different arguments: rank 0: .*; rank 1: "):
        ub.initialize_ub(tp_size=2, backend="host", **arguments)
    assert not ub.is_ub_initialized()


@pytest.mark.mpi(2)
def test_a_rank_that_refuses_tells_the_other(mpi_comm: Any) -> None:
    rank = mpi_comm.Get_rank()
    begin = time.monotonic()
    with pytest.raises(ub.UBDynamicError) as raised:
        ub.initialize_ub([63 if rank else 64, 64], 2, dtype=torch.float32, backend="host")
    assert type(raised.value) is (ub.UBAlignmentError if rank else ub.UBRankMismatchError)
    assert "T = 63" in str(raised.value) and time.monotonic() - begin < 30
    ub.initialize_ub([64, 64], 2, dtype=torch.float32, backend="host")
    ub.destroy_ub()


@pytest.mark.mpi(2)
def test_a_strict_check_sees_a_rank_that_repeats_its_shape(mpi_comm: Any) -> None:
    ub.initialize_ub([64, 64], 2, dtype=torch.float32, backend="host", check="strict")
    for tokens in (64, 16, 16, 64, 16):  # the same shape again is compared too
        ub.set_ub_active_shape([tokens, 64])
    for _ in range(2):  # and once the ranks disagree, no later call passes
        with pytest.raises(ub.UBRankMismatchError, match="rank 0: T = 16; rank 1: T = 18"):
            ub.set_ub_active_shape([16 + 2 * mpi_comm.Get_rank(), 64])
    assert ub.get_ub_active_shape() == (16, 64)
    with pytest.raises(ub.UBRankMismatchError):
        ub.destroy_ub()

# SPDX-License-Identifier: Apache-2.0
"""Scatter and gather of packed rows between real processes, and the gradients of both conventions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ub_dynamic.cp.partition import Partition
from ub_dynamic.cp.scatter import gather, scatter
from ub_dynamic.errors import UBShapeError, UBTimeoutError
from ub_dynamic.packing import PackedBatch


@pytest.fixture(scope="module")
def group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    return world


def partitions(batch: PackedBatch) -> list[Partition]:
    contiguous = Partition.contiguous()
    reversed_ranks = [contiguous.indices(batch, rank).tolist() for rank in reversed(range(batch.cp))]
    return [Partition.zigzag(), contiguous, Partition.grid2d([4, 8], [8, 4]), Partition.custom(reversed_ranks)]


@pytest.mark.mpi(2, 4, launcher="torchrun")
@pytest.mark.parametrize("which", range(4), ids=["zigzag", "contiguous", "grid2d", "custom"])
@pytest.mark.parametrize("replicated", [True, False])
def test_round_trip_and_gradients(which: int, replicated: bool, group: dist.ProcessGroup) -> None:
    rank, cp = dist.get_rank(group), dist.get_world_size(group)
    batch = PackedBatch.from_lengths([32, 64], cp=cp, align=20)
    partition = partitions(batch)[which]
    draw = torch.Generator().manual_seed(5)
    full = torch.rand(batch.total_tokens, 3, 2, dtype=torch.float64, generator=draw, requires_grad=True)
    weight = torch.rand(batch.total_tokens, 3, 2, dtype=torch.float64, generator=draw)
    scale = 1.0 if replicated else 1.0 + rank  # with a loss of its own on every rank

    local = scatter(full, batch, partition, group, replicated=replicated)
    mine = partition.indices(batch, rank)
    assert torch.equal(local, full[mine])
    whole = gather(local * local, batch, partition, group, replicated=replicated)
    assert torch.equal(whole, full * full)
    (whole * weight).sum().mul(scale).backward()

    expected = 2 * full.detach() * weight
    if not replicated:
        # The sum of the losses of all ranks, through this rank's rows of this rank's own full tensor.
        kept = torch.zeros(batch.total_tokens, 1, 1, dtype=torch.float64)
        kept[mine] = sum(1.0 + other for other in range(cp))
        expected = expected * kept
    assert full.grad is not None
    torch.testing.assert_close(full.grad, expected, rtol=1e-14, atol=0)


@pytest.mark.mpi(2, launcher="torchrun")
def test_errors(group: dist.ProcessGroup) -> None:
    batch, zigzag = PackedBatch.from_lengths([8], cp=2), Partition.zigzag()
    with pytest.raises(UBShapeError, match=r"the group has 1 rank\(s\), the batch is laid out for cp = 2"):
        scatter(torch.zeros(8), batch, zigzag, None)
    with pytest.raises(UBShapeError, match=r"shape \(7, 1\): its first dimension must be 8, of T = 8 and cp = 2"):
        scatter(torch.zeros(7, 1), batch, zigzag, group)
    with pytest.raises(UBShapeError, match=r"shape \(8,\): its first dimension must be 4"):
        gather(torch.zeros(8), batch, zigzag, group)


@pytest.mark.mpi(2, launcher="torchrun")
def test_a_rank_that_does_not_come_is_an_error(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ub_dynamic.cp.ring.setup_timeout_s", lambda: 1.0)
    batch = PackedBatch.from_lengths([8], cp=2)
    if dist.get_rank(group) == 0:
        with pytest.raises(UBTimeoutError, match=r"rank 0 waited 1 s for an all-gather of rows by ranks \[0, 1\]"):
            gather(torch.zeros(4), batch, Partition.zigzag(), group)


def test_a_group_of_one() -> None:
    batch = PackedBatch.from_lengths([5, 7])
    full = torch.rand(12, 2, requires_grad=True)
    for partition in (Partition.zigzag(), Partition.contiguous()):
        local = scatter(full, batch, partition, None)
        whole = gather(local, batch, partition, None)
        assert torch.equal(local, full) and torch.equal(whole, full)
        (grad,) = torch.autograd.grad(whole.sum(), full)
        assert torch.equal(grad, torch.ones_like(full))

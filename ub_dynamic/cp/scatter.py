# SPDX-License-Identifier: Apache-2.0
"""Scatter and gather packed tensors over a context-parallel group by a partition, as autograd functions.

Two conventions of what the other ranks do with the full tensor, and so of its gradient:

- ``replicated=True``: every rank holds the same full tensor and computes the same with it, as Megatron does
  around its sequence-parallel regions. Scatter's backward gathers, gather's backward takes the rank's rows.
- ``replicated=False``: each rank's full tensor is its own, and the loss is the sum of the ranks' losses, as
  with a loss per rank whose gradients are summed afterwards. Scatter's backward has zeros in the other ranks'
  rows, gather's backward is a reduce-scatter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import UBShapeError
from ..metadata import indexed
from ..packing import PackedBatch
from .partition import Partition
from .ring import timed_wait


class _Rows(NamedTuple):
    own: torch.Tensor  # packed rows of this rank
    rank_major: torch.Tensor  # packed rows of all ranks, one after another
    inverse: torch.Tensor


def scatter(
    full: torch.Tensor,
    batch: PackedBatch,
    partition: Partition,
    group: dist.ProcessGroup | None,
    *,
    replicated: bool = True,
) -> torch.Tensor:
    """This rank's rows ``[T/cp, ...]`` of ``full`` ``[T, ...]``; forward communicates nothing.

    ``group``: the CP group of ``batch.cp`` ranks; None is a group of one. Raises :class:`UBShapeError` if
    group or rows do not fit the batch, and :class:`UBTimeoutError` on the host if a rank does not come.
    """
    _check(full, batch.total_tokens, batch, group)
    return _Scatter.apply(full, _rows(batch, partition, _rank(group), indexed(full.device)), group, replicated)


def gather(
    local: torch.Tensor,
    batch: PackedBatch,
    partition: Partition,
    group: dist.ProcessGroup | None,
    *,
    replicated: bool = True,
) -> torch.Tensor:
    """``[T, ...]`` of every rank's ``local`` ``[T/cp, ...]``; arguments and errors as in :func:`scatter`."""
    _check(local, batch.local_tokens, batch, group)
    return _Gather.apply(local, _rows(batch, partition, _rank(group), indexed(local.device)), group, replicated)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, full: torch.Tensor, rows: _Rows, group: dist.ProcessGroup | None, replicated: bool
    ) -> torch.Tensor:
        ctx.rows, ctx.group, ctx.replicated = rows, group, replicated
        return full.index_select(0, rows.own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.replicated:
            return _all_gather(grad, ctx.group).index_select(0, ctx.rows.inverse), None, None, None
        full = grad.new_zeros(len(ctx.rows.inverse), *grad.shape[1:])
        return full.index_copy_(0, ctx.rows.own, grad), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, rows: _Rows, group: dist.ProcessGroup | None, replicated: bool
    ) -> torch.Tensor:
        ctx.rows, ctx.group, ctx.replicated = rows, group, replicated
        return _all_gather(local, group).index_select(0, rows.inverse)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.replicated:
            return grad.index_select(0, ctx.rows.own), None, None, None
        return _reduce_scatter(grad.index_select(0, ctx.rows.rank_major), ctx.group), None, None, None


def _all_gather(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is None or dist.get_world_size(group) == 1:
        return local
    full = local.new_empty(dist.get_world_size(group) * local.shape[0], *local.shape[1:])
    request = dist.all_gather_into_tensor(full, local.contiguous(), group=group, async_op=True)
    timed_wait(request, full, f"an all-gather of rows by ranks {dist.get_process_group_ranks(group)}")
    return full


def _reduce_scatter(full: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is None or dist.get_world_size(group) == 1:
        return full
    local = full.new_empty(full.shape[0] // dist.get_world_size(group), *full.shape[1:])
    request = dist.reduce_scatter_tensor(local, full, group=group, async_op=True)
    timed_wait(request, local, f"a reduce-scatter of rows by ranks {dist.get_process_group_ranks(group)}")
    return local


@lru_cache(maxsize=32)
def _rows(batch: PackedBatch, partition: Partition, rank: int, device: torch.device) -> _Rows:
    both = torch.stack([partition.rank_major(batch), partition.inverse(batch)])
    if device.type != "cpu":
        both = both.pin_memory().to(device, non_blocking=True)
    rank_major, inverse = both.unbind()
    local = batch.local_tokens
    return _Rows(rank_major[rank * local : (rank + 1) * local], rank_major, inverse)


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _check(tensor: torch.Tensor, rows: int, batch: PackedBatch, group: dist.ProcessGroup | None) -> None:
    size = 1 if group is None else dist.get_world_size(group)
    if size != batch.cp:
        raise UBShapeError(f"the group has {size} rank(s), the batch is laid out for cp = {batch.cp}")
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        raise UBShapeError(
            f"got a tensor of shape {tuple(tensor.shape)}: its first dimension must be {rows}, of T = "
            f"{batch.total_tokens} and cp = {batch.cp}"
        )

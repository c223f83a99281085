# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of a rank's rows, as arguments of TE's fused kernel or as rows of a frequency table."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..errors import UBUnsupportedError
from ..metadata import copy_ints, indexed
from ..packing import PackedBatch
from .partition import Partition, check_rank


def rope_kwargs(batch: PackedBatch, partition: Partition, rank: int, device: torch.device | str) -> dict[str, Any]:
    """Keyword arguments for TE's ``apply_rotary_pos_emb`` on a rank's ``[T/cp, heads, d]``.

    Next to them it takes ``freqs`` ``[s, 1, 1, d]`` with s of at least ``batch.max_seqlen``. The zigzag is
    what the kernel computes from global padded boundaries and the CP rank. For the contiguous split it gets
    the rank's own boundaries and, for each sequence, the position to start from. Other partitions raise
    :class:`UBUnsupportedError`: take :func:`table_rows` for them.
    """
    check_rank(batch, rank)
    if partition.name == "zigzag":
        cu_seqlens = batch.device_metadata(device).cu_seqlens_padded
        return {"tensor_format": "thd", "fused": True, "cu_seqlens": cu_seqlens, "cp_size": batch.cp, "cp_rank": rank}
    if partition.name == "contiguous":
        cu_seqlens, starts = _contiguous(batch, rank, indexed(device))
        return {"tensor_format": "thd", "fused": True, "cu_seqlens": cu_seqlens, "start_positions": starts}
    raise UBUnsupportedError(
        f"TE's fused rotary kernel counts positions up from one start a sequence, or by the zigzag; "
        f"partition {partition.name!r} needs table_rows(...), rows of a cos/sin table gathered by its "
        f"positions"
    )


def table_rows(batch: PackedBatch, partition: Partition, rank: int, *tables: torch.Tensor) -> torch.Tensor:
    """``[T/cp, d]``: for each local row its angles (or cosines, or sines), for any partition.

    ``tables``: one ``[s, d]`` for 1-D positions; one ``[height, d0]`` and one ``[width, d1]`` for a grid,
    whose rows are concatenated to d = d0 + d1. All on one device.
    """
    positions = partition.positions(batch, rank)
    axes = positions.reshape(len(positions), -1).T.contiguous()
    if len(axes) != len(tables):
        raise UBUnsupportedError(
            f"partition {partition.name!r} has {len(axes)}-D positions, got {len(tables)} table(s): one for each axis"
        )
    on_device = axes.pin_memory().to(tables[0].device, non_blocking=True) if tables[0].is_cuda else axes
    return torch.cat([table.index_select(0, axis) for table, axis in zip(tables, on_device, strict=True)], dim=1)


@lru_cache(maxsize=32)
def _contiguous(batch: PackedBatch, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    starts = [rank * (rows // batch.cp) for rows in batch.padded]
    return copy_ints(device, Partition.contiguous().cu_seqlens_padded(batch), starts)

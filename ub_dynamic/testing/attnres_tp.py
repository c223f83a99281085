# SPDX-License-Identifier: Apache-2.0
"""The Block-AttnRes model on the host backend's tensor-parallel layers, with parts of the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, cast

import torch
from torch import nn

from ..backends.host import ColumnParallelLinear, RowParallelLinear, current_backend, mark_sequence_parallel


class HostLinears:
    """:class:`~ub_dynamic.testing.attnres.Linears` of this rank in the TP group of ``initialize_ub``."""

    def __init__(self) -> None:
        backend = current_backend()
        self.size, self.rank = backend.tp, backend.group.rank

    def column(self, name: str, index: int, weight: torch.Tensor) -> ColumnParallelLinear:
        outputs, inputs = weight.shape
        ub_name = cast(Literal["qkv", "fc1"], name)
        layer = ColumnParallelLinear(inputs, outputs, bias=False, ub_name=ub_name, dtype=weight.dtype)
        layer.weight = nn.Parameter(self.local(weight).clone())
        return layer

    def row(self, name: str, index: int, weight: torch.Tensor) -> RowParallelLinear:
        outputs, inputs = weight.shape
        ub_name = cast(Literal["proj", "fc2"], name)
        layer = RowParallelLinear(inputs, outputs, bias=False, ub_name=ub_name, dtype=weight.dtype)
        layer.weight = nn.Parameter(weight.chunk(self.size, dim=1)[self.rank].contiguous())
        return layer

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(self.size)[self.rank]

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter of the unsplit model (or of its gradient), by the parameter's name."""
        if name.endswith(("qkv.weight", "fc1.weight")):
            return whole.chunk(self.size)[self.rank]
        return whole.chunk(self.size, dim=1)[self.rank] if name.endswith(("proj.weight", "fc2.weight")) else whole


def mark_replicated(chunks: Iterable[nn.Module]) -> None:
    """Mark the parameters that every rank has whole: their gradients cover its own tokens, and have to be summed."""
    for chunk in chunks:
        for module in chunk.modules():
            if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                mark_sequence_parallel(module.parameters(recurse=False))

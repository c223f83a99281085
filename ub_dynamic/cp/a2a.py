# SPDX-License-Identifier: Apache-2.0
"""All-to-all between a split of the rows and a split of the heads, in one collective for several tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .ring import timed_wait
from .rows import take_rows


class HeadsAllToAll:
    """``group`` of A ranks: each holds ``t`` rows of all heads, or ``A*t`` rows of its share of the heads.

    ``order`` and ``inverse`` permute the ``A*t`` gathered rows, which arrive rank by rank; None is the identity.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def gather_rows(
        self,
        tensors: Sequence[torch.Tensor],
        order: torch.Tensor | None,
        outs: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """``[t, H_i, D_i]`` -> ``[A*t, H_i/A, D_i]``, rows in ``order``, contiguous, in ``outs`` where given."""
        if self.size == 1:
            return [take_rows(x, order, out) for x, out in zip(tensors, outs, strict=True)]
        size, rows = self.size, tensors[0].shape[0]
        widths = [x.shape[1] // size * x.shape[2] for x in tensors]
        send = tensors[0].new_empty((size, rows, sum(widths)))
        for piece, x in zip(send.split(widths, dim=2), tensors, strict=True):
            # Head block a of every row goes to rank a.
            piece.copy_(x.reshape(rows, size, -1).transpose(0, 1))
        gathered = self._exchange(send).view(size * rows, -1)
        results = []
        for piece, x, out in zip(gathered.split(widths, dim=1), tensors, outs, strict=True):
            shape = (size * rows, x.shape[1] // size, x.shape[2])
            target = x.new_empty(shape) if out is None else out
            take_rows(piece, order, target.view(size * rows, -1))
            results.append(target.view(shape))
        return results

    def scatter_rows(self, tensors: Sequence[torch.Tensor], inverse: torch.Tensor | None) -> list[torch.Tensor]:
        """The way back: ``[A*t, H_i/A, D_i]`` -> ``[t, H_i, D_i]``."""
        if self.size == 1:
            return [take_rows(x, inverse) for x in tensors]
        size, rows = self.size, tensors[0].shape[0] // self.size
        widths = [x.shape[1] * x.shape[2] for x in tensors]
        send = tensors[0].new_empty((size * rows, sum(widths)))
        for piece, x in zip(send.split(widths, dim=1), tensors, strict=True):
            take_rows(x.reshape(size * rows, -1), inverse, piece)
        received = self._exchange(send.view(size, rows, -1))
        results = []
        for piece, x in zip(received.split(widths, dim=2), tensors, strict=True):
            heads = piece.view(size, rows, x.shape[1], x.shape[2]).transpose(0, 1)
            results.append(heads.reshape(rows, size * x.shape[1], x.shape[2]))
        return results

    def _exchange(self, send: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(send)
        request = dist.all_to_all_single(received, send, group=self.group, async_op=True)
        members = dist.get_process_group_ranks(self.group)
        timed_wait(request, received, f"an all-to-all over heads of ranks {members}")
        return received

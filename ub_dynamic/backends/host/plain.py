# SPDX-License-Identifier: Apache-2.0
"""Collectives without overlap, on ordinary tensors: the reference path of the layers, and small all-reduces.

Sums are taken in rank order, in float32, rounded once, as in the overlapping reduce-scatters. ``name``: TE's name of
the communicator that would overlap, so that ranks in different GEMMs are told apart here too.
"""

from __future__ import annotations

import torch

from .buffers import Region
from .engine import Engine


def all_gather(engine: Engine, local: torch.Tensor, name: str) -> torch.Tensor:
    """``[rows, ...]`` of every rank as ``[tp * rows, ...]``. Blocks until it is complete."""
    return _gather(engine, local.contiguous(), "all-gather", name, local.shape[0] * engine.size)


def reduce_scatter(engine: Engine, partial: torch.Tensor, name: str) -> torch.Tensor:
    """Sum ``[tp * rows, ...]`` over the ranks; each gets its ``rows``. Blocks until it is complete."""
    pieces = partial.contiguous().view(engine.size, -1, *partial.shape[1:])
    received = torch.empty_like(pieces)
    received[engine.rank] = pieces[engine.rank]
    _exchange(engine, "reduce-scatter", name, partial.shape[0], list(pieces.unbind()), list(received.unbind()))
    return _sum(received)


def all_reduce(engine: Engine, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of ``tensor`` over the ranks, the same bits on each. Blocks until it is complete."""
    return _sum(_gather(engine, tensor.reshape(1, -1), "all-reduce", None, 0)).view(tensor.shape)


def _gather(engine: Engine, local: torch.Tensor, what: str, name: str | None, tokens: int) -> torch.Tensor:
    gathered = local.new_empty((engine.size, *local.shape))
    gathered[engine.rank] = local
    _exchange(engine, what, name, tokens, [gathered[engine.rank]] * engine.size, list(gathered.unbind()))
    return gathered.flatten(0, 1)


def _sum(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def _exchange(
    engine: Engine,
    what: str,
    name: str | None,
    tokens: int,
    outgoing: list[torch.Tensor],
    incoming: list[torch.Tensor],
) -> None:
    """Rank r gets ``outgoing[r]``; ``incoming[r]`` comes from rank r. Entries of this rank are left alone."""
    peers = [rank for rank in range(engine.size) if rank != engine.rank]
    with engine.operation(what, name, tokens) as operation:
        operation.wait(
            operation.transfer(
                "all chunks",
                sends=[(_region(outgoing[peer]), peer) for peer in peers],
                receives=[(_region(incoming[peer]), peer) for peer in peers],
            )
        )


def _region(tensor: torch.Tensor) -> Region:
    return Region(tensor, tensor.view(-1).view(torch.uint8).numpy())

# SPDX-License-Identifier: Apache-2.0
"""Documents to the packed microbatches that Megatron's models take, each with a T of its own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ... import api
from ...cp.partition import Partition
from ...errors import UBShapeError, UBStateError
from ...packing import Lengths, PackedBatch
from ...planning import Plan, plan_microbatches

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def plan_batches(
    lengths: Lengths,
    max_tokens: int | None = None,
    *,
    tp: int | None = None,
    cp: int | None = None,
    align: int | None = None,
    **options: Any,
) -> Plan:
    """Pack documents of these ``lengths`` into microbatches that Megatron's parallelism takes.

    Every document gets a multiple of ``2*cp`` rows, and T is a multiple of ``cp*tp`` and of what the registered
    communicators need. ``max_tokens``: largest T over all CP ranks; by default the registered capacity times ``cp``.
    ``tp``, ``cp``: by default those that Megatron initialised. ``align``: tokens on one CP rank come in multiples of
    it; by default the communicators' ``token_multiple()``, or ``tp`` without communicators. ``options``: the rest of
    :func:`~ub_dynamic.plan_microbatches`, whose errors it has.
    """
    tp = _megatron("tensor_model_parallel", "tp") if tp is None else tp
    cp = _megatron("context_parallel", "cp") if cp is None else cp
    if align is None:
        align = api.token_multiple() if api.is_ub_initialized() else tp
    if max_tokens is None:
        if not api.is_ub_initialized():
            raise UBStateError("max_tokens is not given, and no UserBuffers are initialised whose capacity it could be")
        max_tokens = cp * api.max_tokens()
    return plan_microbatches(lengths, max_tokens, tp=tp, cp=cp, align=align, **options)


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One packed microbatch on one rank: the rows of its context-parallel rank, for all of its TP ranks alike.

    ``tokens``, ``labels``, ``position_ids``: int64 ``[1, T/cp]``; ``loss_mask``: float32 ``[1, T/cp]``, 0 in rows
    without a label. Megatron's embedding splits them among TP ranks under sequence parallelism.
    """

    batch: PackedBatch
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    packed_seq_params: PackedSeqParams

    @classmethod
    def pack(
        cls,
        batch: PackedBatch,
        tokens: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        device: torch.device | str,
        *,
        cp_rank: int = 0,
        fill: int = 0,
        ignored: int = -100,
    ) -> Microbatch:
        """Lay the documents out in ``batch`` and take the rows of ``cp_rank``: one asynchronous copy to ``device``.

        ``tokens``, ``labels``: for every document a 1-D integer tensor on the host; a label ``ignored`` counts for
        nothing. ``fill``: the token of padding rows, and the label of rows that have none, since Megatron's
        cross-entropy looks every label up. Raises :class:`UBShapeError` for documents that do not fit ``batch``, and
        what :meth:`PackedBatch.to_megatron` raises.
        """
        if not 0 <= cp_rank < batch.cp:
            raise UBShapeError(f"cp_rank = {cp_rank}: it must be in 0 .. {batch.cp - 1}")
        wanted = batch.pack([each.long() for each in labels], fill=ignored)
        positions = torch.cat([torch.arange(length) for length in batch.padded])
        real = wanted != ignored
        rows = torch.stack(
            [
                batch.pack([each.long() for each in tokens], fill=fill),
                wanted.where(real, torch.tensor(fill)),
                positions,
                real.long(),
            ]
        )
        if batch.cp > 1:
            rows = rows[:, Partition.zigzag().indices(batch, cp_rank)]
        where = torch.device(device)
        if where.type == "cuda":
            rows = rows.pin_memory()
        moved = rows.to(where, non_blocking=True)
        ids, targets, places, mask = (row.unsqueeze(0) for row in moved)
        return cls(batch, ids, targets, mask.float(), places, batch.to_megatron(where))

    def forward_arguments(self) -> dict[str, Any]:
        """Keyword arguments for Megatron's ``GPTModel.forward``, on every pipeline stage."""
        return {
            "input_ids": self.tokens,
            "position_ids": self.position_ids,
            "attention_mask": None,
            "labels": self.labels,
            "packed_seq_params": self.packed_seq_params,
        }

    def masked_sum(self, losses: torch.Tensor) -> torch.Tensor:
        """The sum of the model's ``losses`` ``[1, T/cp]`` over rows with a label: a scalar, for this CP rank."""
        return (losses.float().flatten() * self.loss_mask.flatten()).sum()


def _megatron(name: str, argument: str) -> int:
    """The size of a group that Megatron's ``parallel_state`` holds."""
    try:
        state = importlib.import_module("megatron.core.parallel_state")
        return int(getattr(state, f"get_{name}_world_size")())
    except (ImportError, AssertionError, RuntimeError, ValueError) as error:
        raise UBStateError(f"{argument} is not given, and Megatron is not initialised: {error}") from error

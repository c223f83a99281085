# SPDX-License-Identifier: Apache-2.0
"""The byte-level transformer of the CPU example as a stack of ``te.TransformerLayer`` on packed (THD)
batches.

Sequence parallel: T/tp rows between the layers, all T rows in attention. TE overlaps every all-gather and
reduce-scatter with a GEMM; the model has no call for variable T in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from packed.data import IGNORED, VOCABULARY, Rows
from torch import nn
from transformer_engine.pytorch.attention import RotaryPositionEmbedding

from ub_dynamic.packing import PackedBatch
from ub_dynamic.testing.te_layers import thd_arguments


@dataclass(frozen=True)
class ModelConfig:
    """``hidden`` = H; ``heads`` are divided among the TP ranks. ``max_document``: longest sequence."""

    hidden: int
    layers: int
    heads: int
    max_document: int
    seed: int = 0


@dataclass(frozen=True)
class LocalRows:
    """This rank's T/tp rows of a microbatch on the device."""

    batch: PackedBatch
    tokens: torch.Tensor
    targets: torch.Tensor


def to_device(rows: Rows, rank: int, tp: int, device: torch.device) -> LocalRows:
    """The share of ``rank``: one asynchronous copy."""
    mine = torch.stack([part.tensor_split(tp)[rank] for part in (rows.tokens, rows.targets)])
    tokens, targets = mine.pin_memory().to(device, non_blocking=True)
    return LocalRows(rows.batch, tokens, targets)


class THDTransformer(nn.Module):
    """``forward`` gives the summed cross-entropy over this rank's rows; summed over the ranks it is that of
    the microbatch.
    """

    def __init__(self, config: ModelConfig, tp_group: Any, device: torch.device) -> None:
        super().__init__()
        hidden, self.tp_group = config.hidden, tp_group
        where = {"device": device, "dtype": torch.bfloat16}
        torch.manual_seed(config.seed)
        self.embedding = nn.Embedding(VOCABULARY, hidden, **where)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, **where)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        self.norm = te.RMSNorm(hidden, params_dtype=torch.bfloat16, device=device, sequence_parallel=True)
        torch.manual_seed(config.seed + 1 + dist.get_rank(tp_group))  # each rank its own shard of the matrices
        self.layers = nn.ModuleList(_layer(config, number, tp_group, device) for number in range(config.layers))
        for parameter in (self.embedding.weight, self.head.weight):
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        # Angles for the longest sequence; ghosts are cut short, so the longest document it is.
        self.register_buffer(
            "rotation", RotaryPositionEmbedding(hidden // config.heads)(max(config.max_document, 256)).to(device)
        )

    def forward(self, rows: LocalRows) -> torch.Tensor:
        arguments = thd_arguments(self.layers[0], rows.batch, rows.tokens.device)
        x = self.embedding(rows.tokens)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.rotation, **arguments)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float(), rows.targets, ignore_index=IGNORED, reduction="sum")

    def all_reduce_sequence_parallel_gradients(self) -> None:
        """Each rank saw its own rows: parameters that are whole on every rank need the sum of all."""
        whole = [p for p in self.parameters() if getattr(p, "sequence_parallel", False) and p.grad is not None]
        flat = torch.cat([parameter.grad.flatten() for parameter in whole])
        dist.all_reduce(flat, group=self.tp_group)
        for parameter, part in zip(whole, flat.split([p.numel() for p in whole]), strict=True):
            parameter.grad.copy_(part.view_as(parameter.grad))


def _layer(config: ModelConfig, number: int, tp_group: Any, device: torch.device) -> nn.Module:
    return te.TransformerLayer(
        config.hidden,
        4 * config.hidden,
        config.heads,
        layer_number=number + 1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="padding_causal",
        attn_input_format="thd",
        normalization="RMSNorm",
        bias=False,
        fuse_qkv_params=True,
        set_parallel_mode=True,
        sequence_parallel=True,
        tp_group=tp_group,
        ub_tp_comm_overlap=True,
        params_dtype=torch.bfloat16,
        device=device,
    )

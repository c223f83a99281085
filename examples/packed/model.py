# SPDX-License-Identifier: Apache-2.0
"""A small byte-level transformer, sequence parallel: T/tp rows between the layers, all T rows in attention.

The four projections of a block carry TE's names (qkv, proj, fc1, fc2), so each finds its communicators by
itself. Embedding, norms and head work on a rank's own rows; their parameters are whole on every rank and are
marked, so that their gradients are summed over the ranks. The parallel layers keep this rank's part of one
full random matrix, so the model is the same for every tp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ub_dynamic.backends.host import ColumnParallelLinear, RowParallelLinear, mark_sequence_parallel

from .data import IGNORED, VOCABULARY, Rows

_EPSILON = 1e-5


@dataclass(frozen=True)
class ModelConfig:
    """``hidden`` = H; ``heads`` are divided among the TP ranks, ``hidden`` among the heads."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0


class PackedTransformer(nn.Module):
    """``forward`` gives the summed cross-entropy over this rank's T/tp rows; summed over the ranks it is that
    of the microbatch. ``rank`` of ``tp``: this process in its TP group."""

    def __init__(self, config: ModelConfig, rank: int, tp: int) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        hidden, dtype = config.hidden, config.dtype
        self.rank, self.tp = rank, tp
        self.head_size = hidden // config.heads
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, hidden).mul(0.02).to(dtype))
        self.blocks = nn.ModuleList(_Block(config, tp) for _ in range(config.layers))
        self.norm = nn.RMSNorm(hidden, eps=_EPSILON, dtype=dtype)
        self.head = nn.Parameter(torch.randn(VOCABULARY, hidden).mul(0.02).to(dtype))
        mark_sequence_parallel([self.embedding, self.head, *self.norm.parameters()])

    def forward(self, rows: Rows) -> torch.Tensor:
        mine = rows.tokens.tensor_split(self.tp)[self.rank]
        targets = rows.targets.tensor_split(self.tp)[self.rank]
        rotation = rope(rows.positions, self.head_size)
        x = F.embedding(mine, self.embedding)
        for block in self.blocks:
            x = block(x, rows, rotation)
        logits = F.linear(self.norm(x), self.head)
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


class _Block(nn.Module):
    def __init__(self, config: ModelConfig, tp: int) -> None:
        super().__init__()
        hidden, dtype = config.hidden, config.dtype
        self.heads, self.head_size = config.heads // tp, hidden // config.heads
        self.norm_attention = nn.RMSNorm(hidden, eps=_EPSILON, dtype=dtype)
        self.norm_mlp = nn.RMSNorm(hidden, eps=_EPSILON, dtype=dtype)
        # The rows of the qkv weight go by head, then by q, k and v, so that a rank's share is whole heads.
        self.qkv = ColumnParallelLinear(hidden, 3 * hidden, bias=False, ub_name="qkv", dtype=dtype)
        self.proj = RowParallelLinear(hidden, hidden, bias=False, ub_name="proj", dtype=dtype)
        self.fc1 = ColumnParallelLinear(hidden, 4 * hidden, bias=False, ub_name="fc1", dtype=dtype)
        self.fc2 = RowParallelLinear(4 * hidden, hidden, bias=False, ub_name="fc2", dtype=dtype)
        mark_sequence_parallel([*self.norm_attention.parameters(), *self.norm_mlp.parameters()])

    def forward(self, x: torch.Tensor, rows: Rows, rotation: Rotation) -> torch.Tensor:
        qkv = self.qkv(self.norm_attention(x)).view(-1, self.heads, 3, self.head_size)
        q, k, v = qkv.unbind(2)
        context = attention(rotate(q, rotation), rotate(k, rotation), v, rows)
        x = x + self.proj(context.flatten(1))
        return x + self.fc2(F.gelu(self.fc1(self.norm_mlp(x)), approximate="tanh"))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Causal attention within each document; ``[T, heads, head size]`` in and out, padding rows give zeros.

    One call a document: on a CPU about five times faster than one call with a block-diagonal mask.
    """
    batch = rows.batch
    parts = []
    documents = zip(q.split(batch.padded), k.split(batch.padded), v.split(batch.padded), strict=True)
    for index, (query, key, value) in enumerate(documents):
        if index < batch.documents:
            parts.append(_causal(query, key, value))
        else:
            parts.append(torch.zeros_like(query))
    return torch.cat(parts)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))  # [1, heads, rows, head size]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)


Rotation = tuple[torch.Tensor, torch.Tensor]


def rope(positions: torch.Tensor, head_size: int, base: float = 10_000.0) -> Rotation:
    """Cosines and sines ``[T, 1, head size / 2]`` of rotary embedding at each row's place in its document."""
    frequencies = base ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = positions[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)

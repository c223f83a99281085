# SPDX-License-Identifier: Apache-2.0
"""A Block Attention Residuals transformer (arXiv:2603.15031), cut into pipeline chunks at any sublayer.

Instead of ``x + f(x)`` every sublayer reads a softmax mixture, token by token, of all *blocks* committed so far
and the running sum of its own block; the keys are RMS-normed, the query is learned. Sublayer ``i`` is attention
(within each packed document) for even ``i`` and an MLP for odd ``i``; it commits the running sum as a new block
when ``i`` is a multiple of ``block``, so block 0 is the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from ..errors import UBShapeError
from ..packing import PackedBatch

IGNORED = -100  # target of a row that no document owns


@dataclass(frozen=True)
class AttnResConfig:
    """Sizes. ``sublayers``: attention and MLP together; ``block``: sublayers of one block. ``query_scale``: 0 starts
    with equal weights, as the paper does; tests take random queries, so that every weight matters."""

    sublayers: int
    block: int
    hidden: int = 32
    heads: int = 4
    ffn: int = 64
    vocab: int = 61
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    seed: int = 1
    query_scale: float = 1.0

    def commits(self, sublayers: Sequence[int]) -> int:
        """How many blocks a chunk of these sublayers commits."""
        return sum(index % self.block == 0 for index in sublayers)


@dataclass(frozen=True)
class TokenBatch:
    """One microbatch: its layout, the tokens and the next tokens, ``[T]`` each."""

    packed: PackedBatch
    tokens: torch.Tensor = field(repr=False)
    targets: torch.Tensor = field(repr=False)

    @property
    def total_tokens(self) -> int:
        return self.packed.local_tokens


class Linears(Protocol):
    """How the model makes its linear layers, and which rows of a microbatch this rank holds.

    ``column(name, index, weight)`` and ``row(...)``: a layer ``y = x @ weight.T`` whose weight ``[out, in]`` is
    split over the TP group by rows or by columns. ``local``: this rank's rows of a ``[T, ...]`` tensor.
    ``size``: ranks of the TP group.
    """

    size: int

    def column(self, name: str, index: int, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]: ...

    def row(self, name: str, index: int, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]: ...

    def local(self, rows: torch.Tensor) -> torch.Tensor: ...


class Dense:
    """One rank holds everything."""

    size = 1

    def column(self, name: str, index: int, weight: torch.Tensor) -> nn.Linear:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device=weight.device)
        layer.weight = nn.Parameter(weight)
        return layer

    row = column

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def make_batch(lengths: Sequence[int], config: AttnResConfig, seed: int = 0, tp: int = 1, align: int = 1) -> TokenBatch:
    """A microbatch of random documents with these lengths; each predicts its own next token."""
    packed = PackedBatch.from_lengths(lengths, tp=tp, align=align)
    generator = torch.Generator().manual_seed(1000 + seed)
    documents = [torch.randint(config.vocab, (length,), generator=generator) for length in lengths]
    following = [torch.cat((document[1:], document.new_tensor([IGNORED]))) for document in documents]
    tokens, targets = packed.pack(documents), packed.pack(following, IGNORED)
    return TokenBatch(packed, tokens.to(config.device), targets.to(config.device))


class Mixture(nn.Module):
    """``softmax_n(query . RMSNorm(v_n)) v_n`` over the blocks and the running sum, ``[T, H]`` each."""

    def __init__(self, query: torch.Tensor) -> None:
        super().__init__()
        self.query = nn.Parameter(query)

    def forward(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(list(values))
        precise = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        keys = functional.rms_norm(precise, precise.shape[-1:], eps=1e-6)
        weights = torch.softmax(keys @ self.query.to(keys.dtype), dim=0)
        return torch.einsum("nt,nth->th", weights, precise).to(stacked.dtype)


class Attention(nn.Module):
    """Causal self-attention within each document; the heads are split over the TP group."""

    def __init__(self, config: AttnResConfig, index: int, linears: Linears, draw: _Draw) -> None:
        super().__init__()
        self.width = config.hidden // config.heads
        # Rows by head, q k v of one head together, so that a slice of rows is whole heads.
        self.qkv = linears.column("qkv", index, draw(3 * config.hidden, config.hidden))
        self.proj = linears.row("proj", index, draw(config.hidden, config.hidden))

    def forward(self, x: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.width)).unbind(-2)  # [T, heads / tp, width]
        bounds = packed.cu_seqlens_padded
        done = [self._document(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(bounds) if b > a]
        return self.proj(torch.cat(done).flatten(1))

    @staticmethod
    def _document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


class MLP(nn.Module):
    """``fc2(gelu(fc1(x)))``."""

    def __init__(self, config: AttnResConfig, index: int, linears: Linears, draw: _Draw) -> None:
        super().__init__()
        self.fc1 = linears.column("fc1", index, draw(config.ffn, config.hidden))
        self.fc2 = linears.row("fc2", index, draw(config.hidden, config.ffn))

    def forward(self, x: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class Sublayer(nn.Module):
    """Mixture, norm, and attention or MLP; its output joins the running sum of the block."""

    def __init__(self, config: AttnResConfig, index: int, linears: Linears) -> None:
        super().__init__()
        draw = _Draw(config, index)
        self.commits = index % config.block == 0
        self.mixture = Mixture(draw(config.hidden) * config.query_scale)
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6, dtype=config.dtype, device=config.device)
        kind = MLP if index % 2 else Attention
        self.body = kind(config, index, linears, draw)

    def forward(
        self, running: torch.Tensor, blocks: list[torch.Tensor], packed: PackedBatch
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The running sum and all blocks, after this sublayer."""
        mixed = self.mixture([*blocks, running])
        output = self.body(self.norm(mixed), packed)
        return (output, [*blocks, running]) if self.commits else (running + output, blocks)


class AttnResChunk(nn.Module):
    """Consecutive sublayers; the first chunk has the embedding, the last one the head and the loss.

    ``commits``: how many blocks it adds. A chunk may have no sublayer at all.
    """

    def __init__(
        self,
        config: AttnResConfig,
        sublayers: Sequence[int],
        *,
        first: bool,
        last: bool,
        linears: Linears | None = None,
    ) -> None:
        super().__init__()
        linears = linears or Dense()
        self.first, self.last, self._linears = first, last, linears
        self.commits = config.commits(sublayers)
        embed, draw = _Draw(config, config.sublayers), _Draw(config, config.sublayers + 1)
        self.embedding = nn.Parameter(embed(config.vocab, config.hidden, scale=1.0)) if first else None
        self.layers = nn.ModuleList(Sublayer(config, index, linears) for index in sublayers)
        if last:
            self.mixture = Mixture(draw(config.hidden) * config.query_scale)
            self.norm = nn.RMSNorm(config.hidden, eps=1e-6, dtype=config.dtype, device=config.device)
            self.head = nn.Parameter(draw(config.vocab, config.hidden))

    def forward(
        self, hidden: torch.Tensor | None, blocks: Sequence[torch.Tensor], batch: TokenBatch
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See :data:`ub_dynamic.pipeline.Chunk`. Under TP the loss is this rank's share of the mean."""
        if self.embedding is not None:
            hidden = functional.embedding(self._linears.local(batch.tokens), self.embedding)
        assert hidden is not None
        seen, known = list(blocks), len(blocks)
        for layer in self.layers:
            hidden, seen = layer(hidden, seen, batch.packed)
        if self.last:
            hidden = self._loss(self.norm(self.mixture([*seen, hidden])), batch)
        return hidden, seen[known:]

    def _loss(self, hidden: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        logits = functional.linear(hidden, self.head)
        targets = self._linears.local(batch.targets)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(precise, targets, reduction="sum") / batch.packed.real_tokens


def cut(sublayers: Sequence[int], stages: int) -> list[range]:
    """Sublayers of each stage from how many each has; :class:`UBShapeError` unless there are ``stages`` of them."""
    if len(sublayers) != stages:
        raise UBShapeError(f"{len(sublayers)} numbers of sublayers for {stages} stages")
    starts = [sum(sublayers[:stage]) for stage in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def chunks_of_rank(
    config: AttnResConfig, sublayers: Sequence[int], rank: int, pp: int, linears: Linears | None = None
) -> list[AttnResChunk]:
    """The chunks of one rank: stages rank, rank + pp, ...; ``sublayers[s]`` says how many stage s has."""
    stages = cut(sublayers, len(sublayers))
    last = len(stages) - 1
    return [
        AttnResChunk(config, stages[s], first=s == 0, last=s == last, linears=linears)
        for s in range(rank, len(stages), pp)
    ]


def whole_model(config: AttnResConfig) -> AttnResChunk:
    """The same model in one piece."""
    return AttnResChunk(config, range(config.sublayers), first=True, last=True)


class _Draw:
    """Weights that depend on the seed and the sublayer only, not on how the model is cut."""

    def __init__(self, config: AttnResConfig, index: int) -> None:
        self._generator = torch.Generator().manual_seed(config.seed * 10_000 + index)
        self._config = config

    def __call__(self, *shape: int, scale: float | None = None) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if scale is None else scale
        drawn = torch.randn(*shape, generator=self._generator, dtype=torch.float64) * scale
        return drawn.to(device=self._config.device, dtype=self._config.dtype)

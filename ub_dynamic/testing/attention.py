# SPDX-License-Identifier: Apache-2.0
"""Dense attention in float64, one sequence after the other, and context-parallel attention compared with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..cp.hierarchical import HierarchicalTHDAttention
from ..cp.partition import Partition
from ..packing import PackedBatch

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One attention problem: lengths of the packed sequences, heads, groups of key heads, head size, mask, split."""

    lengths: tuple[int, ...]
    heads: int = 4
    groups: int = 4
    size: int = 8
    causal: bool = True
    partition: Partition = field(default_factory=Partition.zigzag)
    tail: str = "ghost"
    align: int = 1

    def batch(self, cp: int) -> PackedBatch:
        return PackedBatch.from_lengths(self.lengths, cp=cp, align=self.align, tail=self.tail)  # type: ignore[arg-type]


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PackedBatch, causal: bool
) -> torch.Tensor:
    """Packed ``[T, H, D]``, ``[T, Hk, D]`` and ``[T, Hk, Dv]`` -> ``[T, H, Dv]``; 0 in padding. Plain autograd."""
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    for start, length in zip(batch.cu_seqlens_padded, batch.seqlens, strict=False):
        rows = slice(start, start + length)
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x[rows].repeat_interleave(repeat, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / math.sqrt(q.shape[2])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        index = torch.arange(start, start + length, device=q.device)
        out = out.index_copy(0, index, torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return out


def random_qkv(case: Case, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[QKV, torch.Tensor]:
    """Packed q, k, v and the gradient of out, the same on every rank; within [-1, 1] as in TE's own tests."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, case.size) for heads in (case.heads, case.groups, case.groups, case.heads)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-1, 1) for shape in shapes]
    q, k, v, grad = (x.to(dtype) for x in made)
    return (q, k, v), grad


def errors_against_dense(
    case: Case, a2a: dist.ProcessGroup | None, p2p: dist.ProcessGroup | None, **options: str
) -> dict[str, float]:
    """Largest absolute error of out, dq, dk and dv over all rows, float64; the same on every rank.

    ``padding``: the largest absolute value of the gradients in rows of padding, which must be 0.
    """
    module = HierarchicalTHDAttention(a2a, p2p, **options)  # type: ignore[arg-type]
    batch = case.batch(module.cp)
    qkv, grad = random_qkv(case, batch.total_tokens)
    dense = [x.clone().requires_grad_() for x in qkv]
    expected = dense_attention(dense[0], dense[1], dense[2], batch, case.causal)
    expected.backward(grad)

    rows = case.partition.indices(batch, module.cp_rank)
    local = [x[rows].requires_grad_() for x in qkv]
    out = module(*local, batch, causal=case.causal, partition=case.partition)
    out.backward(grad[rows])
    pad = ~case.partition.real_rows(batch, module.cp_rank)
    wanted = [expected.detach()[rows], *(x.grad[rows] for x in dense if x.grad is not None)]
    got = [out.detach(), *(x.grad for x in local if x.grad is not None)]
    worst = [_largest(a - b) for a, b in zip(got, wanted, strict=True)]
    worst.append(max(_largest(x[pad]) for x in got))
    total = torch.tensor(worst)
    if module.cp > 1:
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return dict(zip(("out", "dq", "dk", "dv", "padding"), total.tolist(), strict=True))


def hierarchical_groups(inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's a2a and p2p group when the world is cut into inner groups of ``inner`` ranks. Collective."""
    world, me = dist.get_world_size(), dist.get_rank()
    outer = world // inner
    a2a = [dist.new_group(list(range(p * inner, (p + 1) * inner))) for p in range(outer)]
    p2p = [dist.new_group(list(range(a, world, inner))) for a in range(inner)]
    return a2a[me // inner], p2p[me % inner]


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0

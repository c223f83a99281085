# SPDX-License-Identifier: Apache-2.0
"""Attention over two groups of context-parallel ranks: all-to-all over heads inside, a ring over the outer group.

The scheme of USP (arXiv 2405.07719) and LongVILA (arXiv 2408.10188), for packed batches, with padding. Either group
may be of size 1, which leaves a plain ring or a plain all-to-all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..errors import UBAlignmentError, UBRankMismatchError, UBShapeError
from ..packing import PackedBatch
from .a2a import HeadsAllToAll
from .kernels import AttentionKernel, choose_kernel
from .merge import Merge, exact
from .partition import Partition
from .plan import DevicePlan, ring_plan
from .ring import Ring, Transfer


class HierarchicalTHDAttention(torch.nn.Module):
    """Context-parallel attention on a :class:`~ub_dynamic.packing.PackedBatch`, exact with padding.

    ``a2a_group``: the A ranks, next to each other, that share the heads; ``p2p_group``: the P ranks of the ring, A
    apart, so that ``rank = p*A + a`` among the ``cp = A*P``. None stands for a group of one. ``kernel``: see
    :func:`~ub_dynamic.cp.kernels.choose_kernel`. ``softmax_scale``: ``1/sqrt(D)`` by default. ``wire_dtype``: type in
    which key and value gradients travel around the ring; by default float32 (float64 for such inputs), which makes
    the sum independent of P; the inputs' own type halves those bytes and is what TE does.

    Key and value transfers of the next step run while a step is computed, and gradients likewise.
    """

    def __init__(
        self,
        a2a_group: dist.ProcessGroup | None,
        p2p_group: dist.ProcessGroup | None,
        *,
        kernel: str = "auto",
        softmax_scale: float | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.ring = HeadsAllToAll(a2a_group), Ring(p2p_group)
        self.kernel, self.softmax_scale, self.wire_dtype = kernel, softmax_scale, wire_dtype
        self._check_groups(a2a_group, p2p_group)

    @property
    def cp(self) -> int:
        """Context-parallel ranks in all, ``A*P``."""
        return self.heads.size * self.ring.size

    @property
    def cp_rank(self) -> int:
        """This rank among them, ``p*A + a``: whose rows of a partition it takes and returns."""
        return self.ring.rank * self.heads.size + self.heads.rank

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: PackedBatch,
        *,
        causal: bool = True,
        partition: Partition | None = None,
    ) -> torch.Tensor:
        """``[T/cp, H, D]`` queries, ``[T/cp, Hk, D]`` keys and ``[T/cp, Hk, Dv]`` values -> ``[T/cp, H, Dv]``.

        The rows are those of ``partition`` (zigzag by default) for this rank. H and Hk divide as in grouped-query
        attention; where A does not divide Hk, key heads are replicated. Rows of padding give 0 and get gradients 0.
        Raises :class:`UBShapeError` or :class:`UBAlignmentError` for tensors that do not fit, and
        :class:`UBUnsupportedError` for a mask that the partition is not exact for, before anything is sent.
        """
        partition = Partition.zigzag() if partition is None else partition
        self._check(q, k, v, batch)
        k, v = (_replicate(x, self.heads.size) for x in (k, v))
        kernel = choose_kernel(self.kernel, q, v)
        plan = ring_plan(batch, partition, self.heads.size, self.ring.size, self.ring.rank, causal)
        scale = 1 / math.sqrt(q.shape[2]) if self.softmax_scale is None else self.softmax_scale
        wire = self.wire_dtype or (exact(q.dtype) if self.ring.size > 1 else q.dtype)
        job = _Job(self.heads, self.ring, kernel, plan.on(q.device, kernel.compact), scale, wire)
        return _HierarchicalAttention.apply(q, k, v, job)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PackedBatch) -> None:
        if batch.cp != self.cp:
            raise UBShapeError(f"the batch is made for cp = {batch.cp}, the groups have A*P = {self.cp} ranks")
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 3 or x.shape[0] != batch.local_tokens:
                raise UBShapeError(
                    f"{name} has shape {tuple(x.shape)}: it must be [T/cp, heads, head size] with T/cp = "
                    f"{batch.local_tokens} of this batch"
                )
            if (x.dtype, x.device) != (q.dtype, q.device):
                raise UBShapeError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}: they must agree")
        if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
            raise UBShapeError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the same heads, and k the head size of q, "
                f"{q.shape[2]}"
            )
        _check_heads(q.shape[1], k.shape[1], self.heads.size)

    def _check_groups(self, a2a: dist.ProcessGroup | None, p2p: dist.ProcessGroup | None) -> None:
        if a2a is None or p2p is None:
            return
        inner, outer = dist.get_process_group_ranks(a2a), dist.get_process_group_ranks(p2p)
        me = dist.get_rank()
        if set(inner) & set(outer) != {me}:
            raise UBRankMismatchError(
                f"a2a_group {inner} and p2p_group {outer} of rank {me} must have this rank in common and no other"
            )


@dataclass(frozen=True, eq=False)
class _Job:
    """All that forward and backward share beside tensors."""

    heads: HeadsAllToAll
    ring: Ring
    kernel: AttentionKernel
    plan: DevicePlan
    scale: float
    wire: torch.dtype


class _HierarchicalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: _Job) -> torch.Tensor:
        size, plan = job.heads.size, job.plan
        own = _KeysValues.empty(k, v, size, k.dtype)
        q_all, *_ = job.heads.gather_rows([q, k, v], plan.order, [None, own.keys, own.values])
        current = own
        merge = Merge(lambda: q_all.new_zeros((*q_all.shape[:2], v.shape[2])))
        for step, part in enumerate(plan.steps):
            # The next keys travel while these are multiplied.
            coming = job.ring.shift(current.flat) if step + 1 < len(plan.steps) else None
            if not part.host.empty:
                merge.add(*job.kernel.fwd((q_all, current.keys, current.values), part, job.scale), plan.mask[step])
            if coming is not None:
                current = current.like(coming.wait())
        out_all, lse = merge.finish()
        ctx.save_for_backward(q_all, own.flat, out_all, lse)
        ctx.job, ctx.shapes = job, (own.key_shape, own.value_shape)
        (out,) = job.heads.scatter_rows([out_all], plan.inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        job: _Job = ctx.job
        q, flat, out, lse = ctx.saved_tensors
        current = _KeysValues(flat, *ctx.shapes)
        (dout,) = job.heads.gather_rows([dout], job.plan.order, [None])
        dq, travelling = _Sum(q), _TravellingGradients(job, current)
        for step, part in enumerate(job.plan.steps):
            coming = job.ring.shift(current.flat) if step + 1 < len(job.plan.steps) else None
            grads = None
            if not part.host.empty:
                qkv = q, current.keys, current.values
                part_dq, *grads = job.kernel.bwd(dout, qkv, out, lse, part, job.scale)
                dq.add(part_dq)
            travelling.add(grads)
            if coming is not None:
                current = current.like(coming.wait())
        dk, dv = travelling.home()
        dq_rows, dk_rows, dv_rows = job.heads.scatter_rows([dq.finish(), dk, dv], job.plan.inverse)
        return dq_rows, dk_rows, dv_rows, None


@dataclass(frozen=True, eq=False)
class _KeysValues:
    """Keys and values (or their gradients) one after the other in one buffer, so that a hop is one message."""

    flat: torch.Tensor
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]

    @classmethod
    def empty(cls, k: torch.Tensor, v: torch.Tensor, share: int, dtype: torch.dtype) -> _KeysValues:
        """For what ``k`` and ``v`` are after an all-to-all over ``share`` ranks."""
        shapes = [(x.shape[0] * share, x.shape[1] // share, x.shape[2]) for x in (k, v)]
        return cls(k.new_empty(sum(map(math.prod, shapes)), dtype=dtype), *shapes)

    @property
    def keys(self) -> torch.Tensor:
        return self.flat[: math.prod(self.key_shape)].view(self.key_shape)

    @property
    def values(self) -> torch.Tensor:
        return self.flat[math.prod(self.key_shape) :].view(self.value_shape)

    def like(self, flat: torch.Tensor) -> _KeysValues:
        return _KeysValues(flat, self.key_shape, self.value_shape)


class _TravellingGradients:
    """The gradient of keys and values follows them around the ring, one hop behind, and comes home at the end."""

    def __init__(self, job: _Job, keys_values: _KeysValues) -> None:
        self._job, self._like = job, keys_values
        self._coming: Transfer | None = None
        self._sum: _KeysValues | None = None

    def add(self, grads: list[torch.Tensor] | None) -> None:
        """Add this step's dk and dv (None: none) to the sum that belongs to its keys, and send it on."""
        first = self._coming is None
        total = self._like.like(
            self._like.flat.new_empty(self._like.flat.shape, dtype=self._job.wire)
            if self._coming is None
            else self._coming.wait()
        )
        if first and grads is None:
            total.flat.zero_()
        elif grads is not None:
            for target, grad in zip((total.keys, total.values), grads, strict=True):
                _ = target.copy_(grad) if first else target.add_(grad)
        self._sum = total
        if self._job.ring.size > 1:
            self._coming = self._job.ring.shift(total.flat)

    def home(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of this rank's own keys and values, in their type."""
        assert self._sum is not None
        total = self._sum if self._coming is None else self._like.like(self._coming.wait())
        dtype = self._like.flat.dtype
        return total.keys.to(dtype), total.values.to(dtype)


class _Sum:
    """A sum of tensors of one type, added in the exact type and rounded once."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._first: torch.Tensor | None = None
        self._second: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    def add(self, part: torch.Tensor) -> None:
        # Two parts are added in one launch, which rounds once; only a third one needs a buffer in the exact type.
        if self._total is not None:
            self._total.add_(part)
        elif self._first is None:
            self._first = part
        elif self._second is None:
            self._second = part
        else:
            self._total = self._first.to(exact(part.dtype), copy=True).add_(self._second).add_(part)
            self._first = self._second = None

    def finish(self) -> torch.Tensor:
        if self._total is not None:
            return self._total.to(self._like.dtype)
        if self._first is None:
            return torch.zeros_like(self._like)
        return self._first if self._second is None else torch.add(self._first, self._second)


def _check_heads(heads: int, groups: int, share: int) -> None:
    if heads % groups:
        raise UBAlignmentError(f"H = {heads} query heads must be a multiple of Hk = {groups} key heads")
    if heads % share:
        raise UBAlignmentError(
            f"H = {heads} query heads: the all-to-all gives each of A = {share} ranks as many; the next valid H is "
            f"{-(-heads // share) * share}"
        )
    replicas = share // math.gcd(share, groups)
    unit = groups * replicas
    if heads % unit:
        raise UBAlignmentError(
            f"Hk = {groups} key heads on A = {share} ranks need {replicas} replicas each, and H = {heads} must be a "
            f"multiple of {unit}; the next valid H is {-(-heads // unit) * unit}"
        )


def _replicate(x: torch.Tensor, share: int) -> torch.Tensor:
    """Key or value heads repeated until ``share`` divides them; autograd adds their gradients up."""
    replicas = share // math.gcd(share, x.shape[1])
    return x if replicas == 1 else x.repeat_interleave(replicas, dim=1)

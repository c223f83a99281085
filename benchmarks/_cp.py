# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on a rank of one GPU: TE's module, a step, and what a profiler sees of it."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ub_dynamic.cp.boundary_tables import unseen_keys
from ub_dynamic.cp.partition import Partition
from ub_dynamic.packing import PackedBatch

HEAD_SIZE = 128
TOLERANCE = 3.5e-2  # of TE's own tests, for grouped-query attention in bfloat16
BLOCK = 2**27  # scores that the dense reference holds at once
HUGE = 1e9  # what an error counts as that is not finite
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")


@dataclass(frozen=True)
class Problem:
    """A packed batch and this rank's rows of random q, k, v and dout, the same packed tensors on every rank.
    ``rows``: which of the packed rows are this rank's. ``real`` and ``padding``: which of its own hold tokens, and
    which do not."""

    batch: PackedBatch
    rank: int
    rows: torch.Tensor
    real: torch.Tensor
    padding: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def make(cls, lengths: Sequence[int], cp: int, rank: int, device: torch.device, heads: int, groups: int) -> Problem:
        batch = PackedBatch.from_lengths(lengths, cp=cp)
        rows = Partition.zigzag().indices(batch, rank).to(device)
        tokens = Partition.zigzag().real_rows(batch, rank)
        real, padding = (mask.nonzero().flatten().to(device) for mask in (tokens, ~tokens))
        q, k, v, dout = (whole[rows] for whole in _random(batch, device, heads, groups))
        return cls(batch, rank, rows, real, padding, q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)

    @property
    def whole(self) -> tuple[torch.Tensor, ...]:
        """The packed q, k, v and dout, made again."""
        return tuple(_random(self.batch, self.q.device, self.q.shape[1], self.k.shape[1]))

    def step(self, attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """Forward and backward; out, dq, dk, dv."""
        self.q.grad = self.k.grad = self.v.grad = None
        out = attention(self.q, self.k, self.v).view_as(self.dout)
        out.backward(self.dout)
        return [out.detach(), *(x.grad for x in (self.q, self.k, self.v) if x.grad is not None)]

    def defined(self, tensors: Sequence[torch.Tensor], ring: int = 1) -> list[torch.Tensor]:
        """Of what a step returned the rows that TE defines with a ring of ``ring`` ranks.

        Not out's rows of padding: TE's ring weighs them by softmax statistics that no kernel has written. And not dk
        and dv of sequences of which a ring step has keys but no queries, real tokens included
        (:func:`ub_dynamic.cp.boundary_tables.unseen_keys`). Other gradients of padding are 0.
        """
        out, dq, *of_keys = tensors
        keys = self._keys_defined(ring)
        return [out.index_select(0, self.real), dq, *(x.index_select(0, keys) for x in of_keys)]

    def _keys_defined(self, ring: int) -> torch.Tensor:
        undefined = set(unseen_keys(self.batch, ring))
        local = torch.tensor(self.batch.padded) // self.batch.cp
        keep = torch.tensor([at not in undefined for at in range(len(local))]).repeat_interleave(local)
        return keep.nonzero().flatten().to(self.rows.device)

    def tokens(self, tensors: Sequence[torch.Tensor], ring: int = 1) -> list[torch.Tensor]:
        """Rows of real tokens, of what a step returned; with ``ring`` only those that TE defines."""
        out, dq, *of_keys = tensors
        keys = self._keys_defined(ring)
        keys = keys[torch.isin(keys, self.real)]
        return [*(x.index_select(0, self.real) for x in (out, dq)), *(x.index_select(0, keys) for x in of_keys)]

    @cached_property
    def dense(self) -> list[torch.Tensor]:
        """What a step should return, rows of padding 0."""
        return self.dense_of(*self.whole)

    def dense_of(self, *whole: torch.Tensor) -> list[torch.Tensor]:
        """:attr:`dense` for other packed q, k, v and dout."""
        return [x.index_select(0, self.rows) for x in dense_attention(self.batch, *whole)]

    def outside(
        self, tensors: Sequence[torch.Tensor], ring: int = 1, dense: Sequence[torch.Tensor] | None = None
    ) -> int:
        """Elements of :meth:`tokens` that differ from :attr:`dense` by more than in TE's own tests."""
        return outside_tolerance(self.tokens(tensors, ring), self.tokens(dense or self.dense, ring), TOLERANCE)


def _random(batch: PackedBatch, device: torch.device, heads: int, groups: int) -> Iterator[torch.Tensor]:
    """Packed q, k, v and dout in bfloat16, one after the other."""
    generator = torch.Generator(device).manual_seed(batch.documents)
    for count in (heads, groups, groups, heads):
        shape = (batch.total_tokens, count, HEAD_SIZE)
        whole = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).clamp(-1, 1)
        yield whole.to(torch.bfloat16)


@torch.no_grad()
def dense_attention(
    batch: PackedBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> list[torch.Tensor]:
    """Causal attention of every sequence on its own, and its gradients: out, dq, dk, dv, packed like the inputs.

    Plain torch in float32 (float64 where the inputs are), some queries at a time with all the keys that they see. Rows
    of padding are 0.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    made = [torch.zeros_like(x, dtype=exact) for x in (q, q, k, v)]
    for start, length in zip(batch.cu_seqlens_padded, batch.seqlens, strict=False):
        if length:
            rows = slice(start, start + length)
            parts = [x[rows].transpose(0, 1).to(exact) for x in (q, k, v, dout)]
            for target, part in zip(made, _dense_sequence(*parts), strict=True):
                target[rows] = part.transpose(0, 1)
    return made


def _dense_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """All ``[heads or groups, tokens, D]``."""
    (heads, length, size), groups = q.shape, k.shape[0]
    k, v = (x.repeat_interleave(heads // groups, dim=0) for x in (k, v))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    block = max(1, BLOCK // (heads * length))
    for at in range(0, length, block):
        rows, keys = slice(at, min(at + block, length)), slice(0, min(at + block, length))
        weights = torch.matmul(q[:, rows], k[:, keys].transpose(1, 2)).mul_(size**-0.5)
        hidden = torch.ones(weights.shape[1:], dtype=torch.bool, device=q.device).triu_(at + 1)
        weights = weights.masked_fill_(hidden, float("-inf")).softmax(-1)
        out[:, rows] = torch.matmul(weights, v[:, keys])
        dv[:, keys] += torch.matmul(weights.transpose(1, 2), dout[:, rows])
        delta = (out[:, rows] * dout[:, rows]).sum(-1, keepdim=True)
        scores = torch.matmul(dout[:, rows], v[:, keys].transpose(1, 2)).sub_(delta).mul_(weights).mul_(size**-0.5)
        dq[:, rows] = torch.matmul(scores, k[:, keys])
        dk[:, keys] += torch.matmul(scores.transpose(1, 2), q[:, rows])
    return [out, dq, *(x.unflatten(0, (groups, -1)).sum(1) for x in (dk, dv))]


def groups_of(comm_type: str, inner: int) -> Any:
    """What TE takes as ``cp_group``: the world, or [all-to-all group, ring group]. Collective."""
    if comm_type != "a2a+p2p":
        return dist.group.WORLD
    world, me = dist.get_world_size(), dist.get_rank()
    a2a = [dist.new_group(list(range(at, at + inner))) for at in range(0, world, inner)]
    p2p = [dist.new_group(list(range(at, world, inner))) for at in range(inner)]
    return [a2a[me // inner], p2p[me % inner]]


def ring_of(comm_type: str, cp: int, inner: int = 2) -> int:
    """Over how many ranks TE's keys meet queries chunk by chunk, which matters for :meth:`Problem.defined`."""
    return {"p2p": cp, "all_gather": cp, "a2a+p2p": cp // inner}.get(comm_type, 1)


def te_module(heads: int, groups: int, cp_group: Any, comm_type: str, deterministic: bool) -> Any:
    """``te.DotProductAttention`` for packed causal attention under context parallelism."""
    import transformer_engine.pytorch as te

    # Read when the module is made.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(not deterministic))
    module = te.DotProductAttention(
        heads,
        HEAD_SIZE,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    stream = torch.cuda.Stream()
    module.set_context_parallel_group(cp_group, list(range(dist.get_world_size())), stream, comm_type)
    return module


@dataclass(frozen=True)
class Seen:
    """Of one step. ``launches``: kernels, by name in ``names``; ``launch_calls``: calls that launch one, on the host;
    ``seconds``: of kernels, copies and fills, NCCL's left out, and ``attention_seconds`` of attention itself."""

    launches: int
    launch_calls: int
    copies_to_host: int
    host_waits: int
    seconds: float
    attention_seconds: float
    names: dict[str, int]


def watch(step: Callable[[], object], repeats: int = 5) -> Seen:
    """Profile ``repeats`` steps after one to warm up. A wait a profile is its own, so fewer than one a step is none."""
    step()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(repeats):
            step()
    calls = [event.name for event in found.events() if event.device_type != DeviceType.CUDA]
    # Ranges such as "nccl:send" are shown on the device too, but are no kernels.
    on_device = [
        (event.name, event.device_time_total * 1e-6)
        for event in found.events()
        if event.device_type == DeviceType.CUDA
        and not event.name.startswith("nccl:")
        and not getattr(event, "is_user_annotation", False)
    ]
    names = Counter(name for name, _ in on_device if not name.startswith(("Memcpy", "Memset")))
    mine = [(name, seconds) for name, seconds in on_device if not name.startswith("nccl")]
    return Seen(
        launches=round(sum(names.values()) / repeats),
        launch_calls=round(sum(name in LAUNCHES for name in calls) / repeats),
        copies_to_host=round(sum(name.startswith("Memcpy DtoH") for name, _ in on_device) / repeats),
        host_waits=sum(name in WAITS for name in calls) // repeats,
        seconds=sum(seconds for _, seconds in mine) / repeats,
        attention_seconds=sum(seconds for name, seconds in mine if _is_attention(name)) / repeats,
        names={name: round(count / repeats) for name, count in names.items()},
    )


def _is_attention(name: str) -> bool:
    return any(part in name.lower() for part in ("cudnn", "flash", "fmha"))


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Inside, torch raises where it would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def relative_error(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest of the tensors' relative errors in the Euclidean norm; ``HUGE`` for what is not finite."""
    return max(
        float(((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12)).nan_to_num(HUGE).clamp_max(HUGE))
        for a, b in zip(got, wanted, strict=True)
    )


def outside_tolerance(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> int:
    """Elements that differ by more than ``tolerance * (1 + |wanted|)``, as in TE's own tests, or are no number."""
    return sum(
        int((~((a.float() - b.float()).abs() <= tolerance * (1 + b.float().abs()))).sum())
        for a, b in zip(got, wanted, strict=True)
    )


def differing(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> int:
    """How many of the tensors differ in any bit."""
    return sum(not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)

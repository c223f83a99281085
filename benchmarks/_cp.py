# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on a rank of one GPU: TE's module, a step, and what a profiler sees of it."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ub_dynamic.cp.partition import Partition
from ub_dynamic.packing import PackedBatch

HEAD_SIZE = 128
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")


@dataclass(frozen=True)
class Problem:
    """A packed batch and this rank's rows of random q, k, v and dout, the same packed tensors on every rank. ``real``
    and ``padding``: which of its rows hold tokens, and which do not."""

    batch: PackedBatch
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
        generator = torch.Generator(device).manual_seed(len(lengths))

        def tensor(count: int) -> torch.Tensor:
            shape = (batch.total_tokens, count, HEAD_SIZE)
            whole = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).clamp(-1, 1)
            return whole.to(torch.bfloat16)[rows]

        q, k, v, dout = tensor(heads), tensor(groups), tensor(groups), tensor(heads)
        tokens = Partition.zigzag().real_rows(batch, rank)
        real, padding = (mask.nonzero().flatten().to(device) for mask in (tokens, ~tokens))
        return cls(batch, real, padding, q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)

    def step(self, attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """Forward and backward; out, dq, dk, dv."""
        self.q.grad = self.k.grad = self.v.grad = None
        out = attention(self.q, self.k, self.v).view_as(self.dout)
        out.backward(self.dout)
        return [out.detach(), *(x.grad for x in (self.q, self.k, self.v) if x.grad is not None)]

    def defined(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a step returned without out's rows of padding. TE's ring weighs them by softmax statistics that no
        kernel has written, so they may be anything; gradients of padding are 0 in TE too."""
        return [tensors[0].index_select(0, self.real), *tensors[1:]]


def groups_of(comm_type: str, inner: int) -> Any:
    """What TE takes as ``cp_group``: the world, or [all-to-all group, ring group]. Collective."""
    if comm_type != "a2a+p2p":
        return dist.group.WORLD
    world, me = dist.get_world_size(), dist.get_rank()
    a2a = [dist.new_group(list(range(at, at + inner))) for at in range(0, world, inner)]
    p2p = [dist.new_group(list(range(at, world, inner))) for at in range(inner)]
    return [a2a[me // inner], p2p[me % inner]]


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
    """The largest of the tensors' relative errors in the Euclidean norm."""
    return max(
        float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12))
        for a, b in zip(got, wanted, strict=True)
    )


def outside_tolerance(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> int:
    """Elements that differ by more than ``tolerance * (1 + |wanted|)``, as in TE's own tests."""
    return sum(
        int(((a.float() - b.float()).abs() > tolerance * (1 + b.float().abs())).sum())
        for a, b in zip(got, wanted, strict=True)
    )


def differing(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> int:
    """How many of the tensors differ in any bit."""
    return sum(not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)

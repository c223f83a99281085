# SPDX-License-Identifier: Apache-2.0
"""What differs between measuring on the host and on GPUs: the clock, the layers, how ranks meet.

A comparison that a mode (:mod:`ub_dynamic.modes`) cannot support has a reason here (:func:`refusal`), and is refused
with it instead of being printed.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch

from ..api import destroy_ub, initialize_ub
from ..groups import Group
from ..manager import Manager
from ..modes import CPU_MPI, shares_gpu
from .interleave import no_collection

BackendName = Literal["host", "te"]
ParallelMode = Literal["column", "row"]
WARM = 2  # steps of a block that are not timed

_SHARED = (
    "ranks that share one GPU send NCCL and symmetric memory through sockets or through one memory, so their times say "
    "nothing about several GPUs; run it with one rank a GPU"
)
# What needs a device of its own a rank to be timed.
_NEEDS_GPUS = ("none", "async_tp", "cublasmp")


def refusal(mode: str, arm: str) -> str | None:
    """Why ``mode`` cannot support a comparison with ``arm``, or None."""
    if shares_gpu(mode) and arm in _NEEDS_GPUS:
        return f"{arm}: {_SHARED}"
    return None


class World(Protocol):
    """One rank of a measurement. ``size`` is tp: the TP group is the whole world."""

    backend: BackendName
    mode: str
    rank: int
    size: int
    dtype: torch.dtype
    cfgs: Mapping[str, Mapping[str, Any]] | None  # ``ub_cfgs`` that this world needs; None: TE's defaults

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small ``value``, on every rank."""

    def meet(self) -> None:
        """All ranks, with everything done on every device."""

    def timed(self, step: Callable[[Any], Any], steps: int, before: Callable[[], Any] | None = None) -> float:
        """Milliseconds a step of ``steps`` calls ``step(before())``; ``before`` itself is not timed."""

    def initialize(self, capacity: int, hidden: int, **options: Any) -> Manager:
        """``initialize_ub`` at ``[capacity, hidden]`` for this world; :meth:`destroy` ends it."""

    def destroy(self) -> None:
        """``destroy_ub``, all ranks together."""

    def linear(self, name: str, before: int, after: int, mode: ParallelMode) -> torch.nn.Module:
        """A tensor-parallel linear of ``[before, after]`` features that overlaps under TE's ``name``, without bias."""

    def plain_linear(self, before: int, after: int) -> torch.nn.Module:
        """A linear without tensor parallelism: the GEMMs alone."""

    def random(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        """Standard normal, another on each rank."""


class HostWorld:
    """Ranks on CPUs, over MPI; times are wall times after a barrier."""

    backend: BackendName = "host"
    mode = CPU_MPI
    cfgs: Mapping[str, Mapping[str, Any]] | None = None

    def __init__(self, group: Group, dtype: torch.dtype = torch.float32) -> None:
        self.group, self.dtype = group, dtype
        self.rank, self.size = group.rank, group.size

    def gather(self, value: Any) -> list[Any]:
        return self.group.allgather(value, "gathering what was measured")

    def meet(self) -> None:
        self.group.barrier("staying together in a measurement")

    def timed(self, step: Callable[[Any], Any], steps: int, before: Callable[[], Any] | None = None) -> float:
        total = 0
        clock = time.perf_counter_ns
        with no_collection():
            step(before() if before is not None else None)  # warm, on a core that has slept
            self.meet()
            for _ in range(steps):
                value = before() if before is not None else None
                begin = clock()
                step(value)
                total += clock() - begin
        return total / 1e6 / steps

    def initialize(self, capacity: int, hidden: int, **options: Any) -> Manager:
        return initialize_ub((capacity, hidden), self.size, dtype=self.dtype, backend="host", **options)

    def destroy(self) -> None:
        destroy_ub()

    def linear(self, name: str, before: int, after: int, mode: ParallelMode) -> torch.nn.Module:
        from ..backends.host import ColumnParallelLinear, RowParallelLinear

        kind: Any = ColumnParallelLinear if mode == "column" else RowParallelLinear
        made: torch.nn.Module = kind(before, after, bias=False, ub_name=name, dtype=self.dtype)
        return made

    def plain_linear(self, before: int, after: int) -> torch.nn.Module:
        return torch.nn.Linear(before, after, bias=False, dtype=self.dtype)

    def random(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(64 * seed + self.rank)
        return torch.randn(shape, generator=generator).to(self.dtype)


class TEWorld:
    """Ranks on GPUs, in BF16; times are those of CUDA events on each rank's own stream.

    ``world``: the rank's groups and device (:func:`ub_dynamic.testing.te_world.te_world`).
    """

    backend: BackendName = "te"
    dtype = torch.bfloat16

    def __init__(self, world: Any, mode: str) -> None:
        from ..testing.te_world import ub_cfgs_with_room

        self.world, self.mode = world, mode
        self.cfgs: Mapping[str, Mapping[str, Any]] | None = ub_cfgs_with_room(world)
        self.rank, self.size = world.rank, world.size

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = self.world.gather(value)
        return found

    def meet(self) -> None:
        self.world.barrier()

    def timed(self, step: Callable[[Any], Any], steps: int, before: Callable[[], Any] | None = None) -> float:
        torch.cuda.synchronize()
        with no_collection():
            for _ in range(WARM):
                step(before() if before is not None else None)
            if before is None:
                begin, end = _event(), _event()
                begin.record()
                for _ in range(steps):
                    step(None)
                end.record()
                end.synchronize()
                return float(begin.elapsed_time(end)) / steps
            marks = [(_event(), _event()) for _ in range(steps)]
            for begin, end in marks:
                value = before()
                begin.record()
                step(value)
                end.record()
            marks[-1][1].synchronize()
            return statistics.fmean(float(begin.elapsed_time(end)) for begin, end in marks)

    def initialize(self, capacity: int, hidden: int, **options: Any) -> Manager:
        from ..testing.te_memory import initialise

        return initialise(self.world, [capacity, hidden], **{"ub_cfgs": self.cfgs, **options})

    def destroy(self) -> None:
        self.world.barrier()
        destroy_ub()

    def linear(
        self, name: str, before: int, after: int, mode: ParallelMode, flags: Mapping[str, bool] | None = None
    ) -> torch.nn.Module:
        """``flags``: the layer's ``ub_*`` flags, by default those of TE's default overlap."""
        import transformer_engine.pytorch as te

        from ..testing.te_layers import OVERLAPS

        return te.Linear(
            before,
            after,
            bias=False,
            parallel_mode=mode,
            tp_group=self.world.tp_group,
            sequence_parallel=True,
            ub_name=name,
            params_dtype=self.dtype,
            device=self.world.device,
            **(OVERLAPS["default"].flags() if flags is None else flags),
        )

    def plain_linear(self, before: int, after: int) -> torch.nn.Module:
        import transformer_engine.pytorch as te

        return te.Linear(before, after, bias=False, params_dtype=self.dtype, device=self.world.device)

    def random(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        from ..testing.te_layers import random_tensor

        return random_tensor(shape, self.world, seed)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@contextlib.contextmanager
def open_world(backend: BackendName, mode: str) -> Any:
    """The world of this rank, which :mod:`ub_dynamic.bench.start` started."""
    if backend == "te":
        from ..testing.te_world import keep_to_own_processors, te_world

        with te_world() as world:
            keep_to_own_processors(world)
            yield TEWorld(world, mode)
        return
    from ..groups import tensor_parallel_group
    from ..ranks import discover

    torch.set_num_threads(1)
    group = tensor_parallel_group(discover().world_size)
    try:
        yield HostWorld(group)
    finally:
        group.close()

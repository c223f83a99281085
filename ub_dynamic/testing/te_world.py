# SPDX-License-Identifier: Apache-2.0
"""One rank of a TE run: its device, its process groups, and the stock UserBuffers of one exact shape."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ..backends.names import DGRAD_REDUCE_SCATTER, LAYERS
from .one_gpu import device

_FEW_SM = 4  # of 132 on an H200; TE's default is 16
POISON = 0xFF  # every byte: NaN in bfloat16, E4M3 and E5M2
# TE's fused attention has a backward that is not deterministic; two runs then differ without any
# communication.
_DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NVTE_TORCH_COMPILE": "0", "PYTORCH_JIT": "0"}


@dataclass(frozen=True)
class World:
    """``tp_group`` is NCCL, for TE's layers; ``control`` is gloo, for barriers and small objects."""

    rank: int
    size: int
    device: torch.device
    tp_group: Any
    control: Any

    def barrier(self) -> None:
        """All ranks, with everything done on every device."""
        torch.cuda.synchronize()
        dist.barrier(self.control)

    def meet(self) -> None:
        """All ranks, on the host alone."""
        dist.barrier(self.control)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small ``value``, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values


@contextlib.contextmanager
def te_world(timeout_s: float = 120.0) -> Iterator[World]:
    """Join the ranks that :mod:`ub_dynamic.testing.one_gpu` or torchrun started; the TP group is the whole
    world.
    """
    for name, value in _DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    with contextlib.suppress(ImportError):  # a run without TE's layers needs none
        import transformer_engine.pytorch  # noqa: F401  # after its switches are set, before the collector is told
    gc.collect()
    gc.freeze()  # what was imported stays; a collection then takes a millisecond instead of a third of a second
    here = torch.device(device())
    torch.cuda.set_device(here)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("nccl", timeout=limit)
    try:
        control = dist.new_group(backend="gloo", timeout=limit)
        yield World(dist.get_rank(), dist.get_world_size(), here, dist.group.WORLD, control)
    except BaseException:
        # At once: an orderly end would wait for kernels that wait for the other ranks. The launcher ends those.
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def keep_to_own_processors(world: World) -> None:
    """This rank on its share of the processors, with the threads that it starts from now on: for timings.

    A core that runs two threads at once gives each about half of its speed, so whole cores are shared out.
    """
    cores = whole_cores(sorted(os.sched_getaffinity(0)))
    share = len(cores) // world.size
    if share:
        mine = cores[world.rank * share : (world.rank + 1) * share]
        os.sched_setaffinity(0, [processor for core in mine for processor in core])


def whole_cores(processors: Sequence[int], system: Path = Path("/sys/devices/system/cpu")) -> list[tuple[int, ...]]:
    """``processors``, those of one core together; each for itself where the machine does not tell."""
    cores: dict[str, list[int]] = {}
    for processor in processors:
        try:
            name = (system / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            name = str(processor)
        cores.setdefault(name, []).append(processor)
    return [tuple(core) for core in cores.values()]


def quantization_modes(names: Sequence[str]) -> list[Any]:
    """TE's ``UserBufferQuantizationMode`` members, by the names ``"none"`` and ``"fp8"``."""
    import transformer_engine.pytorch as te

    return [getattr(te.UserBufferQuantizationMode, name.upper()) for name in names]


def ub_cfgs_with_room(
    world: World, ub_cfgs: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]] | None:
    """TE's ``ub_cfgs``, with fewer streaming multiprocessors a communication kernel where more than two ranks share
    a GPU.

    TE's kernels wait for each other while they hold 16 to 32 of them a rank. Four ranks on one GPU leave a GEMM none
    that is free for long, and after ``UB_TIMEOUT`` a wait ends and the results are wrong.
    """
    cfgs = None if ub_cfgs is None else {name: dict(cfg) for name, cfg in ub_cfgs.items()}
    if world.size <= 2 * torch.cuda.device_count():
        return cfgs
    cfgs = cfgs or {}
    absent = {DGRAD_REDUCE_SCATTER.get(name) for name, cfg in cfgs.items() if cfg.get("method", "bulk") != "bulk"}
    for name, (method, _) in LAYERS.items():
        if name not in absent and cfgs.get(name, {}).get("method", method) in ("bulk", "pipeline"):
            cfgs[name] = {"num_sm": _FEW_SM, **cfgs.get(name, {})}
    return cfgs


def make_stock_userbuffers(
    world: World,
    shape: Sequence[int],
    modes: Sequence[str] = ("none",),
    ub_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """TE's own UserBuffers, made for exactly ``shape`` by TE's own function: the reference of every
    comparison. ``ub_cfgs`` pass through :func:`ub_cfgs_with_room`.

    TE makes a new group of the whole world each time and never ends it; it is given the control group
    instead, so that hundreds of shapes can be tried in one process.
    """
    import transformer_engine.pytorch.module.base as base

    cfgs = ub_cfgs_with_room(world, ub_cfgs)
    with mock.patch.object(dist, "new_group", return_value=world.control):
        base.initialize_ub(
            list(shape),
            world.size,
            quantization_modes=quantization_modes(modes),
            dtype=torch.bfloat16,
            ub_cfgs=None if cfgs is None else [cfgs] * len(modes),
            bootstrap_backend="gloo",
        )


@contextlib.contextmanager
def stock_userbuffers(
    world: World,
    shape: Sequence[int],
    modes: Sequence[str] = ("none",),
    ub_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[None]:
    """Those of :func:`make_stock_userbuffers`, and at the end none."""
    make_stock_userbuffers(world, shape, modes, ub_cfgs)
    import transformer_engine.pytorch.module.base as base

    try:
        yield
    finally:
        world.barrier()
        base.destroy_ub()
        gc.collect()  # a traceback may hold a communicator, which would then destroy the next ones
        world.barrier()


def communicators() -> dict[Any, Any]:
    """TE's table of communicators. Keep no reference to a value: the first that dies destroys all of them."""
    import transformer_engine.pytorch.module.base as base

    return base._ub_communicators or {}


def poison(world: World) -> None:
    """Fill every registered buffer with NaN on every rank, its whole capacity; the active shape is capacity
    then.
    """
    import ub_dynamic as ubd

    world.barrier()
    ubd.reset_ub_active_shape()
    for key in list(communicators()):
        communicators()[key].get_buffer().view(torch.uint8).fill_(POISON)
    world.barrier()

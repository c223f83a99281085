# SPDX-License-Identifier: Apache-2.0
"""What shape changes and re-initialisations cost: host time, CUDA calls, memory of the device and of the
host.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ub_dynamic as ubd

from .te_world import World, quantization_modes

_APART = 500  # changes that one rank may be ahead in these loops; the rank board takes 1024 for calls left out
_RECORDED = 2500  # more collectives than the 2000 that torch's flight recorder keeps, 512 bytes each, once


def resident_bytes() -> int:
    """Memory of this process on the host, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def device_bytes(world: World) -> int:
    """Memory in use on the GPU, of all processes on it; every rank waits, so that none allocates meanwhile."""
    gc.collect()
    world.barrier()
    free, total = torch.cuda.mem_get_info()
    world.barrier()
    return total - free


def alternate(world: World, lengths: Sequence[int], hidden: int, calls: int) -> None:
    """``calls`` changes of the active shape, each to another T than before."""
    shapes = [[tokens, hidden] for tokens in lengths]
    count = len(shapes)
    for first in range(0, calls, _APART):
        for call in range(first, min(first + _APART, calls)):
            ubd.set_ub_active_shape(shapes[call % count])
        world.meet()


def growth(world: World, lengths: Sequence[int], hidden: int, calls: int, rounds: int = 2) -> dict[str, int]:
    """Bytes that ``calls`` changes leave behind: on the host, on the device, in torch's allocator.

    On the host the least of some rounds: what an allocator takes once more after a collection is in one of them, what
    is lost at a change is in each.
    """
    alternate(world, lengths, hidden, calls)  # pages that allocators take once
    for _ in range(_RECORDED):
        world.meet()
    device, allocated = device_bytes(world), torch.cuda.memory_allocated()
    host = []
    for _ in range(rounds):
        before = resident_bytes()
        alternate(world, lengths, hidden, calls)
        host.append(resident_bytes() - before)
    return {
        "host_growth_bytes": max(0, min(host)),
        "device_growth_bytes": max(0, device_bytes(world) - device),
        "allocator_growth_bytes": max(0, torch.cuda.memory_allocated() - allocated),
    }


def time_calls(world: World, lengths: Sequence[int], hidden: int, calls: int) -> list[float]:
    """Microseconds of each of ``calls`` changes, as Python sees them (the clock's own cost taken off)."""
    shapes = [[tokens, hidden] for tokens in lengths]
    count, clock = len(shapes), time.perf_counter_ns
    taken = []
    for call in range(calls):
        if call % _APART == 0:
            world.meet()
        shape = shapes[call % count]
        begin = clock()
        ubd.set_ub_active_shape(shape)
        taken.append(clock() - begin)
    empty = []
    for _ in range(1000):
        begin = clock()
        empty.append(clock() - begin)
    own = sorted(empty)[500]
    return [max(0, nanoseconds - own) / 1000 for nanoseconds in taken]


def cuda_calls(world: World, lengths: Sequence[int], hidden: int, calls: int = _APART) -> list[str]:
    """Names of the CUDA runtime and driver calls, kernels and copies that ``calls`` changes make."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as trace:
        torch.ones(1, device=world.device).add_(1)  # what the profiler must see, or it sees nothing at all
        torch.cuda.synchronize()
    if not any(_is_cuda(event) for event in trace.events()):
        raise RuntimeError("the profiler sees no CUDA call at all here, so it can prove nothing")
    shapes = [[tokens, hidden] for tokens in lengths]
    world.barrier()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=activities) as trace:
            for call in range(min(calls, _APART)):
                ubd.set_ub_active_shape(shapes[call % len(shapes)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [event.name for event in trace.events() if _is_cuda(event)]


def reinitialise(world: World, shape: Sequence[int], cycles: int, modes: Sequence[str] = ("none",)) -> list[float]:
    """Initialise and destroy ``cycles`` times; seconds of each."""
    taken = []
    for _ in range(cycles):
        begin = time.perf_counter()
        initialise(world, shape, modes)
        ubd.set_ub_active_shape([world.size, shape[1]])
        ubd.destroy_ub()
        taken.append(time.perf_counter() - begin)
    return taken


def initialise(world: World, shape: Sequence[int], modes: Sequence[str] = ("none",), **options: Any) -> ubd.Manager:
    """TE's twelve communicators at ``shape``, dynamic."""
    return ubd.initialize_ub(
        list(shape),
        world.size,
        quantization_modes=quantization_modes(modes),
        dtype=torch.bfloat16,
        bootstrap_backend="gloo",
        backend="te",
        **options,
    )


def _is_cuda(event: Any) -> bool:
    if event.name == "cudaDeviceSynchronize" and event.cpu_parent is None:
        return False  # the profiler's own, when it stops
    return re.match(r"cu(da)?[A-Z]", event.name) is not None or "CUDA" in str(event.device_type)

# SPDX-License-Identifier: Apache-2.0
"""``bench set-shape``: what one change of the active shape costs, another T each time, and the memory it leaves.

On the host one pass measures the time of each call, a second one the memory that Python and the communicators hold
before and after as many calls; on GPUs the CUDA calls that a change makes are counted as well.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

from .. import api
from .report import Report
from .worlds import TEWorld, World

HOST_CAPACITY, HOST_HIDDEN = 4096, 256
# TE's names make ten communicators that follow the shape and two of method "external" that do not; here all follow
HOST_CFGS = {"proj_wgrad": {"method": "bulk"}, "fc2_wgrad": {"method": "bulk"}}
_BATCH = 500  # calls between two barriers: free-running ranks would be further apart than training ever lets them

TE_CAPACITY, TE_HIDDEN = 16384, 4096
TE_LENGTHS = (4096, 12288, 2048, 16384, 8192)


def measure(world: World, options: Mapping[str, Any], report: Report) -> None:
    """Options: ``calls``, and for TE ``timed`` (how many of them are timed one by one)."""
    if isinstance(world, TEWorld):
        _on_gpus(world, options, report)
    else:
        report.row({"tp": world.size, **_on_host(world, options["calls"])})


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The medians, and what a million changes leave behind."""
    if rows and "set_shape_median_us" in rows[0]:
        return {key: value for key, value in rows[0].items() if key != "tp"}
    return te_figures(rows)


# ---- on the host -------------------------------------------------------------------------------------------


def shapes(tp: int) -> Sequence[tuple[int, int]]:
    """Every T once in a fixed random order, never the same one twice in a row."""
    import numpy as np

    tokens = np.random.default_rng(0).permutation(np.arange(tp, HOST_CAPACITY + 1, tp))
    return [(int(value), HOST_HIDDEN) for value in tokens]


def _on_host(world: World, calls: int) -> dict[str, float]:
    import numpy as np

    from ..backends.host.buffers import allocated_bytes

    manager = world.initialize(HOST_CAPACITY, HOST_HIDDEN, ub_cfgs=HOST_CFGS)
    every = shapes(world.size)
    registered = allocated_bytes()
    nanoseconds = np.zeros(calls, dtype=np.int64)  # written once here, so that filling it allocates nothing
    _call(world, every, calls, nanoseconds)
    microseconds = nanoseconds / 1e3
    _call(world, every, _BATCH, None)
    gc.collect()
    tracemalloc.start()
    _call(world, every, _BATCH, None)
    held = np.zeros(2, dtype=np.int64)  # filled in place: a number kept in between would count too
    held[0] = tracemalloc.get_traced_memory()[0]
    _call(world, every, calls, None)
    held[1] = tracemalloc.get_traced_memory()[0]
    growth = int(held[1] - held[0]) + allocated_bytes() - registered
    found = {
        "set_shape_median_us": float(np.median(microseconds)),
        "set_shape_p99_us": float(np.percentile(microseconds, 99)),
        "set_shape_mean_us": float(microseconds.mean()),
        "allocated_bytes_growth": growth,
        "communicators": len(manager.backend.specs),
        "calls": calls,
    }
    tracemalloc.stop()
    world.destroy()
    return found


def _call(world: World, every: Sequence[tuple[int, int]], calls: int, nanoseconds: Any) -> None:
    """``calls`` changes of shape, each with the time it took. Ends where it began, at the last of ``every``."""
    set_shape, now = api.set_ub_active_shape, time.perf_counter_ns
    set_shape(every[-1])
    for first in range(0, calls, _BATCH):
        world.meet()
        for call in range(first, min(first + _BATCH, calls)):
            shape = every[call % len(every)]
            begin = now()
            set_shape(shape)
            end = now()
            if nanoseconds is not None:
                nanoseconds[call] = end - begin
    set_shape(every[-1])


# ---- on GPUs -----------------------------------------------------------------------------------------------


def _on_gpus(world: TEWorld, options: Mapping[str, Any], report: Report) -> None:
    from ..testing.te_memory import alternate, cuda_calls, growth, initialise, time_calls

    ranks, timed = world.world, options["timed"]
    for modes in (("none",), ("none", "fp8")):
        for check in ("deferred", "never"):
            report.progress(0, 4, f"{len(modes)} modes, check {check}")
            manager = initialise(ranks, [TE_CAPACITY, TE_HIDDEN], modes, check=check)
            alternate(ranks, TE_LENGTHS, TE_HIDDEN, 2000)
            world.meet()
            taken = sorted(time_calls(ranks, TE_LENGTHS, TE_HIDDEN, timed))
            same = sorted(time_calls(ranks, [TE_LENGTHS[-1]], TE_HIDDEN, timed))
            row: dict[str, Any] = {
                "communicators": len(manager.backend.specs) + len(manager.backend.skipped),
                "dynamic_communicators": len(manager.backend.specs),
                "check": check,
                "median_us": statistics.median(taken),
                "p99_us": taken[int(0.99 * len(taken))],
                "same_shape_median_us": statistics.median(same),
            }
            report.row({"tp": world.size, **row, **_worst(world, row)})
            if modes == ("none",) and check == "deferred":
                calls = options["calls"]
                row.update({"calls": calls, **growth(ranks, TE_LENGTHS, TE_HIDDEN, calls)})
                report.row({"tp": world.size, **row, **_worst(world, row)})
                # after the rest: a profiler that does not work here ends the ranks
                row = {"check": check, "cuda_calls": len(cuda_calls(ranks, TE_LENGTHS, TE_HIDDEN))}
                report.row({"tp": world.size, **row, **_worst(world, row)})
            del manager
            world.destroy()


def _worst(world: World, row: Mapping[str, Any]) -> dict[str, Any]:
    """The largest value over the ranks of every measured number."""
    rows = world.gather(dict(row))
    return {key: max(each[key] for each in rows) for key, value in row.items() if not isinstance(value, str)}


def te_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the twelve communicators of one quantization mode, with the deferred check."""
    default = [row for row in rows if row["check"] == "deferred" and row.get("communicators") == 12]
    keys = {"set_shape_median_us": "median_us", "set_shape_p99_us": "p99_us"}
    keys["same_shape_median_us"] = "same_shape_median_us"
    made = {figure: max(row[key] for row in default) for figure, key in keys.items() if default}
    parts = ("host_growth_bytes", "device_growth_bytes", "allocator_growth_bytes")
    if grown := [row for row in default if "calls" in row]:
        made["memory_growth_bytes"] = max(sum(row[part] for part in parts) for row in grown)
        made["growth_calls"] = min(row["calls"] for row in grown)
    if seen := [row["cuda_calls"] for row in rows if "cuda_calls" in row]:
        made["cuda_calls"] = max(seen)
    return made

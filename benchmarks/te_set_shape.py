# SPDX-License-Identifier: Apache-2.0
"""Cost of one shape change over TE's twelve communicators. Writes te_set_shape.json.

python benchmarks/te_set_shape.py --tp 2 4
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _one_gpu
import torch

import ub_dynamic as ubd
from ub_dynamic.testing.te_memory import (
    alternate,
    cuda_calls,
    device_bytes,
    initialise,
    resident_bytes,
    time_calls,
)
from ub_dynamic.testing.te_world import keep_to_own_processors

HIDDEN, CAPACITY = 4096, 16384
LENGTHS = (4096, 12288, 2048, 16384, 8192)


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    keep_to_own_processors(world)
    for modes in (("none",), ("none", "fp8")):
        for check in ("deferred", "never"):
            manager = initialise(world, [CAPACITY, HIDDEN], modes, check=check)
            alternate(world, LENGTHS, HIDDEN, 2000)
            world.barrier()
            taken = sorted(time_calls(world, LENGTHS, HIDDEN, options.timed))
            same = sorted(time_calls(world, [LENGTHS[-1]], HIDDEN, options.timed))
            row: dict[str, Any] = {
                "communicators": len(manager.backend.specs) + len(manager.backend.skipped),
                "dynamic_communicators": len(manager.backend.specs),
                "check": check,
                "median_us": statistics.median(taken),
                "p99_us": taken[int(0.99 * len(taken))],
                "same_shape_median_us": statistics.median(same),
            }
            add({**row, **_worst(world, row)})
            if modes == ("none",) and check == "deferred":
                row.update(_growth(world, options.calls))
                add({**row, **_worst(world, row)})
                # after the rest: a profiler that does not work here ends the ranks
                row = {"check": check, "cuda_calls": len(cuda_calls(world, LENGTHS, HIDDEN))}
                add({**row, **_worst(world, row)})
            del manager
            world.barrier()
            ubd.destroy_ub()


def _growth(world: Any, calls: int) -> dict[str, Any]:
    """Memory of the host and the device before and after ``calls`` changes."""
    alternate(world, LENGTHS, HIDDEN, 100_000)  # pages that the allocators of the process take once
    device, host, allocated = device_bytes(world), resident_bytes(), torch.cuda.memory_allocated()
    alternate(world, LENGTHS, HIDDEN, calls)
    host = resident_bytes() - host
    allocated = torch.cuda.memory_allocated() - allocated
    return {
        "calls": calls,
        "host_growth_bytes": max(0, host),
        "device_growth_bytes": max(0, device_bytes(world) - device),
        "allocator_growth_bytes": max(0, allocated),
    }


def _worst(world: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """The largest value over the ranks of every measured number."""
    rows = world.gather(dict(row))
    return {key: max(each[key] for each in rows) for key, value in row.items() if not isinstance(value, str)}


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
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


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=180)
    options.add_argument("--timed", type=int, default=100_000, help="changes that are timed one by one")
    options.add_argument("--calls", type=int, default=1_000_000, help="changes between two looks at memory")
    raise SystemExit(_one_gpu.main("te_set_shape", options.parse_args(), measure, figures))

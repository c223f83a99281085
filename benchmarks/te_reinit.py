# SPDX-License-Identifier: Apache-2.0
"""Initialise, destroy, initialise, ...: time of each and memory that is not given back. Writes
te_reinit.json.

    python benchmarks/te_reinit.py --tp 2 4
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _one_gpu

from ub_dynamic.testing.te_memory import device_bytes, reinitialise, resident_bytes

WARM_UP = 5  # cycles before the first look: lazy initialisation of CUDA, gloo and the allocators


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    shape = [options.capacity, options.hidden]
    reinitialise(world, shape, WARM_UP)
    device, host = device_bytes(world), resident_bytes()
    taken = reinitialise(world, shape, options.cycles)
    grown = resident_bytes() - host
    row = {
        "cycles": options.cycles,
        "device_growth_bytes": device_bytes(world) - device,
        "host_growth_bytes": max(world.gather(grown)),
        "cycle_median_ms": 1000 * max(world.gather(statistics.median(taken))),
    }
    add(row)


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        "cycles": min(row["cycles"] for row in rows),
        "memory_growth_bytes": max(0, *(row["device_growth_bytes"] for row in rows)),
        "host_growth_bytes_per_cycle": max(row["host_growth_bytes"] / row["cycles"] for row in rows),
        "cycle_median_ms": max(row["cycle_median_ms"] for row in rows),
    }


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=120)
    options.add_argument("--cycles", type=int, default=50)
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--capacity", type=int, default=4096)
    raise SystemExit(_one_gpu.main("te_reinit", options.parse_args(), measure, figures))

# SPDX-License-Identifier: Apache-2.0
"""Random operations on dynamic UserBuffers, each against exact ones. Writes te_stress.json.

python benchmarks/te_stress.py --tp 2 4
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import _one_gpu

from ub_dynamic.testing import te_stress


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    begin = time.perf_counter()
    outcome = te_stress.run(world, options.operations, options.seed)
    add({"seed": options.seed, **asdict(outcome), "seconds": time.perf_counter() - begin})
    if world.rank == 0:
        print(outcome, flush=True)


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        "operations": min(row["operations"] for row in rows),
        "mismatches": sum(row["mismatches"] for row in rows),
        "shape_changes": min(row["shape_changes"] for row in rows),
        "memory_growth_bytes": max(0, *(row["memory_growth_bytes"] for row in rows)),
    }


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=240)
    options.add_argument("--operations", type=int, default=1000)
    options.add_argument("--seed", type=int, default=20261130)
    options.add_argument("--name", default="te_stress", help="name of the result file")
    chosen = options.parse_args()
    raise SystemExit(_one_gpu.main(chosen.name, chosen, measure, figures))

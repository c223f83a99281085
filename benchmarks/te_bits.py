# SPDX-License-Identifier: Apache-2.0
"""Bits: dynamic UserBuffers at T against TE's own made for exactly T, on one GPU. Writes te_bits.json.

python benchmarks/te_bits.py --tp 2 4
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import _one_gpu

from ub_dynamic.testing.te_bits import run_sweep, sweeps
from ub_dynamic.testing.te_layers import OVERLAPS


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    for sweep in sweeps(world.size, options.lengths, options.hidden, options.capacity):
        if options.overlap and sweep.overlap not in options.overlap:
            continue
        begin = time.perf_counter()
        rows = run_sweep(world, sweep)
        for row in rows:
            add(asdict(row))
        if world.rank == 0:
            wrong = sum(row.mismatches for row in rows)
            cases = sum(row.cases for row in rows)
            seconds = time.perf_counter() - begin
            print(
                f"{sweep.overlap} {sweep.mode}: {cases} cases, {wrong} mismatches, {seconds:.1f} s",
                flush=True,
            )


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    methods = {method for row in rows for method in OVERLAPS[row["overlap"]].methods}
    return {
        "cases": sum(row["cases"] for row in rows),
        "mismatches": sum(row["mismatches"] for row in rows),
        "tensors": sum(row["tensors"] for row in rows),
        "layer_kinds": len({row["layer"] for row in rows}),
        "methods": len(methods),
        "recipes": len({row["recipe"] for row in rows}),
        "plain_cases": sum(row["plain_cases"] for row in rows),
        "plain_outside_te_tolerance": sum(row["plain_outside_te_tolerance"] for row in rows),
        "plain_relative_error_max_bf16": _largest(rows, ("bf16",)),
        "plain_relative_error_max_fp8": _largest(rows, ("delayed", "current")),
    }


def _largest(rows: Sequence[dict[str, Any]], recipes: tuple[str, ...]) -> float:
    return max((row["plain_relative_error"] for row in rows if row["recipe"] in recipes), default=0.0)


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__)
    options.add_argument("--lengths", type=int, default=40, help="how many T for each sweep")
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--capacity", type=int, default=2048)
    options.add_argument("--overlap", nargs="*", choices=sorted(OVERLAPS), help="only these choices of overlap")
    options.add_argument("--name", default="te_bits", help="name of the result file, as for another version of TE")
    chosen = options.parse_args()
    raise SystemExit(_one_gpu.main(chosen.name, chosen, measure, figures))

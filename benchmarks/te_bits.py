# SPDX-License-Identifier: Apache-2.0
"""Bits: dynamic UserBuffers at T against TE's own made for exactly T. Writes te_bits.json.

    python benchmarks/te_bits.py --tp 2 4               ranks that share one GPU
    python benchmarks/te_bits.py --tp 4 --gpus          one rank a GPU

Every layer kind, in BF16 and both FP8 recipes, with every choice of overlap: where more than two ranks share a GPU, all
but the pipelined dgrad (:func:`ub_dynamic.testing.te_bits.refusal`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import _one_gpu

from ub_dynamic.testing.te_bits import fused_fp8_runs, refusal, run_sweep, sweeps
from ub_dynamic.testing.te_layers import OVERLAPS


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    fused_fp8 = fused_fp8_runs()
    if not fused_fp8 and world.rank == 0:
        print("left out: te.ops in FP8, whose backward this Transformer Engine cannot run", flush=True)
    for sweep in sweeps(world.size, options.lengths, options.hidden, options.capacity, fused_fp8=fused_fp8):
        if options.overlap and sweep.overlap not in options.overlap:
            continue
        if reason := refusal(world, sweep):
            if world.rank == 0:
                print(f"left out: {reason}", flush=True)
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


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``plain_*`` are against the layer without overlap: with dynamic buffers, and ``stock_*`` with TE's exact ones.
    ``unrepeatable``: of the mismatches, where TE with exact buffers differs from itself. ``outside_beyond_stock``
    tensors are outside TE's tolerances with dynamic buffers only.
    """
    methods = {method for row in rows for method in OVERLAPS[row["overlap"]].methods}
    sums = ("cases", "mismatches", "unrepeatable", "tensors", "plain_cases", "plain_outside_te_tolerance")
    made: dict[str, float] = {key: sum(row[key] for row in rows) for key in sums}
    made |= {key: sum(row[key] for row in rows) for key in ("stock_outside_te_tolerance", "outside_beyond_stock")}
    made |= {"layer_kinds": len({row["layer"] for row in rows}), "methods": len(methods)}
    made |= {"recipes": len({row["recipe"] for row in rows}), "least_cases": min(row["cases"] for row in rows)}
    for name, recipes in (("bf16", ("bf16",)), ("fp8", ("delayed", "current"))):
        for whose in ("plain", "stock"):
            errors = [row[f"{whose}_relative_error"] for row in rows if row["recipe"] in recipes]
            made[f"{whose}_relative_error_max_{name}"] = max(errors, default=0.0)
    return made


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__)
    options.add_argument("--lengths", type=int, default=40, help="how many T for each sweep")
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--capacity", type=int, default=2048)
    options.add_argument("--overlap", nargs="*", choices=sorted(OVERLAPS), help="only these choices of overlap")
    options.add_argument("--name", default="te_bits", help="name of the result file, as for another version of TE")
    chosen = options.parse_args()
    raise SystemExit(_one_gpu.main(chosen.name, chosen, measure, figures))

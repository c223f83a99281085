# SPDX-License-Identifier: Apache-2.0
"""Time of a training step at T: dynamic, made for exactly T, padded to capacity. Writes te_step.json.

    python benchmarks/te_step.py --tp 2 4 --seconds 85
    python benchmarks/te_step.py --hidden 8192 --steps-alone --name tp_step_h8192

One step is forward and backward of ``te.LayerNormMLP(H, 4H)`` in BF16 with TE's default overlaps, by
:mod:`ub_dynamic.bench.tp_step`, which says how arms are compared; then one step for each of real microbatches, four
source files of the standard library each, dynamic and padded to capacity in turns.
"""

from __future__ import annotations

import time

_START = time.monotonic()  # importing torch counts, too

import argparse  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

os.environ.setdefault("NVTE_TORCH_COMPILE", "1")  # TE's own default, which te_world would switch off
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import _one_gpu  # noqa: E402

from ub_dynamic.bench import tp_step  # noqa: E402
from ub_dynamic.bench.lengths import one_workload  # noqa: E402
from ub_dynamic.bench.report import Budget, Report  # noqa: E402
from ub_dynamic.bench.worlds import World  # noqa: E402
from ub_dynamic.planning import plan_fixed_count  # noqa: E402

figures = tp_step.figures  # of the rows, where every one of these programs has it
FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.125)
ARMS = ("exact", "dynamic", "pad")
LENGTHS = "lengths"
# Of the time; at the smallest T, where a step is shortest, the costs of guard and auto are asked for as well. Of steps
# alone those at a large T take more time.
SHARES: Mapping[Any, float] = {1.0: 0.12, 0.75: 0.12, 0.5: 0.12, 0.25: 0.18, 0.125: 0.34, LENGTHS: 0.12}


def measure(world: World, options: Mapping[str, Any], report: Report) -> None:
    capacity = options["capacity"]
    hidden = options["hidden"]
    sizes = {
        "capacity": capacity,
        "hidden": hidden,
        "ffn": 4 * hidden,
        "layer": "te.LayerNormMLP",
        "arms": ARMS,
        "operands": options["operands"],
    }
    steps_of = tp_step.factory_of(world, sizes, None)
    tp_step.settle(world)
    start = max(world.gather(time.monotonic()))
    if world.rank == 0:
        print(f"ready after {start - _START:.1f} s", flush=True)
    alone = options["steps_alone"]
    shares = {fraction: 1 + fraction for fraction in FRACTIONS} if alone else SHARES
    budget = Budget(options["seconds"] - (start - _START) - 4.0, shares)
    for fraction in FRACTIONS:
        arms = (*ARMS, *tp_step.COSTS) if fraction == min(FRACTIONS) and not alone else ARMS
        tokens = int(capacity * fraction)
        row = tp_step.one_length(world, steps_of, sizes, tokens, arms, budget.until(fraction))
        report.row({"tp": world.size, "kind": "step", **row})
        if world.rank == 0:
            print({key: round(value, 4) for key, value in row.items() if isinstance(value, float)}, flush=True)
    if alone:
        return
    tokens = real_lengths(options["microbatches"], world.size, capacity)
    row = one_workload(world, steps_of, capacity, tokens, ("dynamic", "pad"), budget.until(LENGTHS))
    report.row({"tp": world.size, "kind": "lengths", **row})


def real_lengths(count: int, tp: int, capacity: int) -> list[int]:
    """T of ``count`` microbatches of the CPU example (``examples/train_packed.py``), scaled so that the largest is
    the capacity.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from packed.data import draw, read_documents

    documents = draw(read_documents(2048), 4 * count, seed=0)
    plan = plan_fixed_count([len(document) for document in documents], 4, tp=tp)
    scale = capacity / plan.max_tokens
    return [min(capacity, -(-int(tokens * scale) // tp) * tp) for tokens in plan.tokens]


def main(parse: Callable[[], argparse.Namespace]) -> int:
    options = parse()
    return _one_gpu.main(options.name, options, _one_gpu.measuring(measure, timings=True), figures)


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=200)
    options.add_argument("--hidden", type=int, default=4096)
    options.add_argument("--capacity", type=int, default=16384)
    options.add_argument("--seconds", type=float, default=150, help="for each start, imports included")
    options.add_argument("--microbatches", type=int, default=24, help="of real lengths, after the steps")
    options.add_argument("--steps-alone", action="store_true", help="no real lengths, no costs of guard and auto")
    options.add_argument("--operands", choices=tp_step.OPERANDS, default=tp_step.OPERANDS[0])
    options.add_argument("--name", default="te_step", help="of the result file")
    raise SystemExit(main(options.parse_args))

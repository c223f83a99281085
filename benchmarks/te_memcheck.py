# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer memcheck over every method at T below and at capacity. Writes te_memcheck.json.

    python benchmarks/te_memcheck.py --tp 2

Each rank runs under a sanitizer of its own, without MPS. ``errors`` counts what the sanitizers report, and a
start that does not end well counts as one. A choice of overlaps that TE computes right with FP8 alone runs with FP8.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _one_gpu

from ub_dynamic.modes import gpu_mode
from ub_dynamic.testing.one_gpu import OneGpu, exit_status, run
from ub_dynamic.testing.results import write_result
from ub_dynamic.testing.te_layers import OVERLAPS
from ub_dynamic.testing.te_world import World

HIDDEN, CAPACITY = 256, 256
_SUMMARY = re.compile(rb"ERROR SUMMARY: (\d+) error")
_ROOT = Path(__file__).resolve().parents[1]


def on_rank(names: Sequence[str]) -> None:
    """For each choice of overlaps a step of ``te.LayerNormMLP`` at two smaller T and at capacity."""
    from ub_dynamic.testing.te_world import te_world

    with te_world(300.0) as world:
        for name in names:
            _steps(world, name)
            print(f"steps done: {name}", flush=True)


def _steps(world: World, name: str) -> None:
    import ub_dynamic as ubd
    from ub_dynamic.testing.te_layers import KINDS, build, random_input, recipe_of, step
    from ub_dynamic.testing.te_world import quantization_modes, ub_cfgs_with_room

    overlap = OVERLAPS[name]
    recipe = recipe_of("current" if overlap.fp8_only else "bf16")
    ubd.initialize_ub(
        [CAPACITY, HIDDEN],
        world.size,
        quantization_modes=quantization_modes([overlap.mode]),
        ub_cfgs=ub_cfgs_with_room(world, overlap.ub_cfgs),
        bootstrap_backend="gloo",
        backend="te",
    )
    kind = KINDS["te.LayerNormMLP"]  # it has every method that a choice of overlaps has
    layer = build(kind, overlap, HIDDEN, world)
    for tokens in (CAPACITY // 2, (16 if overlap.fp8_only else 4) * world.size, CAPACITY):
        world.barrier()
        ubd.set_ub_active_shape([tokens, HIDDEN])
        step(layer, random_input(kind, tokens, HIDDEN, world), world, recipe)
        print(f"{name}: T = {tokens} of {CAPACITY}", flush=True)
    world.barrier()
    ubd.destroy_ub()


class _Tee(io.BytesIO):
    """What the ranks say, kept and passed on at once."""

    def write(self, text: Any) -> int:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return super().write(text)


def check(tp: int, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """One start under the sanitizer: its error counts and how it ended."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise SystemExit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    command = [sanitizer, "--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no"]
    command += [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--on-rank", *names]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path, "UB_TIMEOUT": "600", "UB_DYNAMIC_TIMEOUT": "300"}
    output = _Tee()
    begin = time.monotonic()
    try:
        code = run(command, OneGpu(tp, timeout_s=timeout_s, env=environment), output).returncode
    except (KeyboardInterrupt, SystemExit) as signalled:
        code = exit_status(signalled)
    text = output.getvalue()
    counts = [int(count) for count in _SUMMARY.findall(text)]
    done = sum(text.count(f"steps done: {name}".encode()) for name in names)
    complete = code == 0 and done == tp * len(names) and len(counts) >= tp
    errors = sum(counts) + (0 if complete else 1)
    methods = dict.fromkeys(method for name in names for method in OVERLAPS[name].methods)
    row = {"tp": tp, "methods": "; ".join(methods), "errors": errors, "overlaps": len(names), "overlap_steps": done}
    return {**row, "status": code, "summaries": len(counts), "seconds": time.monotonic() - begin}


def main(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for tp in options.tp:
        rows.append(check(tp, options.overlap, options.timeout))
        print(rows[-1], flush=True)
        figures = {"errors": sum(row["errors"] for row in rows), "methods": len(rows[0]["methods"].split("; "))}
        write_result("te_memcheck", figures, rows, mode=gpu_mode(tp, shared=True), folder=options.out)
        if rows[-1]["status"] in _one_gpu.SIGNALLED:
            return int(rows[-1]["status"])
    return int(any(row["errors"] for row in rows))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _one_gpu.parser(__doc__, tp=(2,), timeout=280)
    parser.add_argument("--overlap", nargs="+", choices=sorted(OVERLAPS), default=list(OVERLAPS))
    parser.add_argument("--on-rank", nargs="+", choices=sorted(OVERLAPS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse()
    if chosen.on_rank:
        on_rank(chosen.on_rank)
    else:
        raise SystemExit(main(chosen))

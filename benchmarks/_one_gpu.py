# SPDX-License-Identifier: Apache-2.0
"""A benchmark program that starts itself on several ranks of one GPU and gets rows back as they are measured.

The same file is both: started by hand it launches the ranks, started by the launcher it measures. Rank 0
appends one JSON line a row, so that a run that ends early keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ub_dynamic.testing.one_gpu import OneGpu, active_ranks, run
from ub_dynamic.testing.results import write_result

_ROWS = "UB_DYNAMIC_BENCH_ROWS"
_ROOT = str(Path(__file__).resolve().parents[1])

Row = dict[str, Any]
Measure = Callable[[Any, argparse.Namespace, Callable[[Mapping[str, Any]], None]], None]
Figures = Callable[[Sequence[Row]], dict[str, float]]


def parser(description: str, *, tp: Sequence[int] = (2, 4), timeout: float = 300) -> argparse.ArgumentParser:
    """The options that every one of these programs has."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--tp", type=int, nargs="+", default=list(tp), help="ranks, one start each")
    made.add_argument("--out", type=Path, default=None, help="folder of the result file")
    made.add_argument("--timeout", type=float, default=timeout, help="seconds for each start")
    made.add_argument("--no-mps", action="store_true", help="let the ranks take turns")
    return made


def main(name: str, options: argparse.Namespace, measure: Measure, figures: Figures) -> int:
    """Launch, or measure on this rank. The result file is written after each start, with all rows so far."""
    if active_ranks() is not None and _ROWS in os.environ:
        _measure(measure, options)
        return 0
    rows: list[Row] = []
    worst = 0
    for tp in options.tp:
        code, found = start(tp, sys.argv, timeout_s=options.timeout, mps=not options.no_mps)
        rows += found
        worst = worst or code
        if not found:
            print(f"{name}: no rows from {tp} ranks (status {code})", file=sys.stderr)
            continue
        made = {**figures(rows), "failed_starts": int(worst != 0)}
        write_result(name, made, rows, mode=f"one-gpu-{max(row['tp'] for row in rows)}-ranks", folder=options.out)
        print(name, json.dumps(made))
    return worst


def start(tp: int, command: Sequence[str], *, timeout_s: float, mps: bool) -> tuple[int, list[Row]]:
    """Run a benchmark file with its arguments on ``tp`` ranks; its exit status and the rows it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.touch()
        environment = {
            _ROWS: str(path),
            "PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")])),
        }
        options = OneGpu(tp, mps=mps, timeout_s=timeout_s, env=environment)
        outcome = run([sys.executable, "-W", "ignore", *command], options)
        return outcome.returncode, [json.loads(line) for line in path.read_text().splitlines()]


def _measure(measure: Measure, options: argparse.Namespace) -> None:
    from ub_dynamic.testing.te_world import te_world

    with te_world() as world, open(os.environ[_ROWS], "a", buffering=1) as file:

        def add(row: Mapping[str, Any]) -> None:
            if world.rank == 0:
                file.write(json.dumps({"tp": world.size, **row}) + "\n")

        measure(world, options, add)

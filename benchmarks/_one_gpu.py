# SPDX-License-Identifier: Apache-2.0
"""A benchmark program that starts itself on several ranks of one GPU and gets rows back as they are measured.

The same file is both: started by hand it launches the ranks, started by the launcher it measures. Rank 0
appends one JSON line a row, so that a run that ends early, or is ended, keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ub_dynamic.testing.one_gpu import OneGpu, active_ranks, run
from ub_dynamic.testing.results import write_result

_ROWS = "UB_DYNAMIC_BENCH_ROWS"
_ROOT = str(Path(__file__).resolve().parents[1])
_ENDED = 128 + 15  # exit status of a run that SIGTERM ended

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
        else:
            made = {**figures(rows), "failed_starts": int(worst != 0)}
            write_result(name, made, rows, mode=f"one-gpu-{max(row['tp'] for row in rows)}-ranks", folder=options.out)
            print(name, json.dumps(made))
        if code == _ENDED:
            break
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
        try:
            code = run([sys.executable, "-W", "ignore", *command], options).returncode
        except SystemExit as ended:  # by a signal, when all ranks are gone: what they measured counts
            code = int(ended.code or 0)
        lines = path.read_text().split("\n")[:-1]  # whole lines
        return code, [json.loads(line) for line in lines]


def merge(results: Sequence[Path], figures: Figures, target: Path) -> None:
    """One result file of several starts of one program that ran apart from each other."""
    records = sorted((json.loads(path.read_text()) for path in results), key=lambda record: int(_ranks(record)))
    rows = [row for record in records for row in record["rows"]]
    failed = sum(record["figures"].get("failed_starts", 0) for record in records)
    newest = max(records, key=lambda record: record["date"])
    sizes = " ".join(dict.fromkeys(str(row["tp"]) for row in rows))
    merged = {
        **newest,
        "command": re.sub(r"--tp( \d+)+", f"--tp {sizes}", newest["command"]),
        "mode": f"one-gpu-{max(row['tp'] for row in rows)}-ranks",
        "figures": {**figures(rows), "failed_starts": failed},
        "rows": rows,
    }
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(merged, indent=1, allow_nan=False) + "\n")
    partial.replace(target)


def _ranks(record: Mapping[str, Any]) -> str:
    return str(record["mode"]).split("-")[2]


def _measure(measure: Measure, options: argparse.Namespace) -> None:
    from ub_dynamic.testing.te_world import te_world

    with te_world() as world, open(os.environ[_ROWS], "a", buffering=1) as file:

        def add(row: Mapping[str, Any]) -> None:
            if world.rank == 0:
                file.write(json.dumps({"tp": world.size, **row}) + "\n")

        measure(world, options, add)

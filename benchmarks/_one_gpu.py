# SPDX-License-Identifier: Apache-2.0
"""A benchmark program that starts itself on several ranks, of one GPU or one a GPU, and gets rows back as they come.

The same file is both: started by hand it launches the ranks, started by the launcher it measures. Rank 0
appends one JSON line a row, so that a run that ends early, or is ended, keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ub_dynamic.bench.report import Report
from ub_dynamic.bench.start import EVENTS, Ended, collect
from ub_dynamic.bench.worlds import TEWorld, World, refusal
from ub_dynamic.modes import gpu_mode, ranks_apart, ranks_on_one_gpu, shares_gpu
from ub_dynamic.output_file import write_whole
from ub_dynamic.testing.one_gpu import active_ranks, exit_status, signals_as_exit
from ub_dynamic.testing.results import write_result

SIGNALLED = [exit_status(-number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]  # of ended runs

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
    made.add_argument("--gpus", action="store_true", help="one rank a GPU, started by torchrun")
    return made


def timed_parser(name: str, description: str, *, seconds: float, timeout: float) -> argparse.ArgumentParser:
    """Those of a program that measures times with one rank a GPU, for so many seconds; ``name``: of its result."""
    made = parser(description, tp=(2,), timeout=timeout)
    made.add_argument("--seconds", type=float, default=seconds, help="time to measure in, for each start")
    made.add_argument("--name", default=name, help="name of the result file")
    return made


def main(name: str, options: argparse.Namespace, measure: Measure, figures: Figures) -> int:
    """Launch, or measure on this rank. The result file is written after each start, with all rows so far."""
    if EVENTS in os.environ:
        _measure(measure, options)
        return 0
    if options.gpus and (missing := gpus_missing(max(options.tp))) is not None:
        print(f"{name}: --gpus: {missing}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    worst = 0
    for tp in options.tp:
        code, found = start(tp, sys.argv, timeout_s=options.timeout, mps=not options.no_mps, gpus=options.gpus)
        rows += found
        worst = worst or code
        if not found:
            print(f"{name}: no rows from {tp} ranks (status {code})", file=sys.stderr)
        else:
            made = {**figures(rows), "failed_starts": int(worst != 0)}
            mode = gpu_mode(max(row["tp"] for row in rows), shared=not options.gpus)
            write_result(name, made, rows, mode=mode, folder=options.out)
            print(name, json.dumps(made))
        if code in SIGNALLED:
            break
    return worst


def gpus_missing(ranks: int) -> str | None:
    """Why there is no GPU for each of ``ranks`` ranks, or None."""
    import torch

    found = torch.cuda.device_count()
    if found >= ranks:
        return None
    return f"torch sees {found} GPU(s) here, and {ranks} ranks need one each; rehearse.py runs ranks that share one"


def start(tp: int, command: Sequence[str], *, timeout_s: float, mps: bool, gpus: bool = False) -> tuple[int, list[Row]]:
    """Run a benchmark file with its arguments on ``tp`` ranks; its exit status and the rows it wrote, also of a run
    that a signal ended."""
    events: list[Mapping[str, Any]] = []
    mode, output = gpu_mode(tp, shared=not gpus), sys.stdout.buffer
    try:
        with signals_as_exit():
            ended = collect(command, mode, tp, timeout_s, events.append, mps=mps, output=output)
    except (KeyboardInterrupt, SystemExit) as signalled:
        ended = Ended(exit_status(signalled), tuple(events), "")
    return ended.status, ended.rows


def merge(results: Sequence[Path], figures: Figures, target: Path) -> None:
    """One result file of several starts of one program that ran apart from each other."""
    records = sorted((json.loads(path.read_text()) for path in results), key=lambda record: _ranks(record["mode"]))
    rows = [row for record in records for row in record["rows"]]
    failed = sum(record["figures"].get("failed_starts", 0) for record in records)
    newest = max(records, key=lambda record: record["date"])
    sizes = " ".join(dict.fromkeys(str(row["tp"]) for row in rows))
    merged = {
        **newest,
        "command": re.sub(r"--tp( \d+)+", f"--tp {sizes}", newest["command"]),
        "mode": gpu_mode(max(row["tp"] for row in rows), shared=not ranks_apart(newest["mode"])),
        "figures": {**figures(rows), "failed_starts": failed},
        "rows": rows,
    }
    write_whole(target, json.dumps(merged, indent=1, allow_nan=False) + "\n")


def _ranks(mode: str) -> int:
    return ranks_on_one_gpu(mode) or ranks_apart(mode)


def timing_world(world: Any) -> TEWorld:
    """``world`` for timings: in the mode that it runs in, this rank on processors of its own.

    Where ranks share a GPU, says that times are left out (:func:`times`).
    """
    from ub_dynamic.testing.te_world import keep_to_own_processors

    keep_to_own_processors(world)
    timing = TEWorld(world, gpu_mode(world.size, shared=active_ranks() is not None))
    if world.rank == 0 and (reason := refusal(timing.mode, "none")) is not None:
        print(f"left out: times, as of {reason}", flush=True)
    return timing


def times(world: TEWorld, fields: Row) -> Row:
    """``fields`` of a row, which are times between ranks; none of them where they mean nothing."""
    return {} if shares_gpu(world.mode) else fields


def connections() -> Row:
    """Of a row: the hardware queues of this process, on which overlap of streams depends."""
    return {"cuda_device_max_connections": int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))}


def measuring(measure: Callable[[World, Mapping[str, Any], Report], None], timings: bool = False) -> Measure:
    """A measurement of :mod:`ub_dynamic.bench` as such a program has it; ``timings``: on processors of its own."""

    def adapted(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
        from ub_dynamic.testing.te_world import keep_to_own_processors

        if timings:
            keep_to_own_processors(world)
        mode = gpu_mode(world.size, shared=active_ranks() is not None)
        report = Report(lambda event: add(event["row"]) if "row" in event else None)
        measure(TEWorld(world, mode), vars(options), report)

    return adapted


def _measure(measure: Measure, options: argparse.Namespace) -> None:
    from ub_dynamic.testing.te_world import te_world

    with te_world() as world, open(os.environ[EVENTS], "a", buffering=1) as file:

        def add(row: Mapping[str, Any]) -> None:
            if world.rank == 0:
                file.write(json.dumps({"row": {"tp": world.size, **row}}) + "\n")

        measure(world, options, add)

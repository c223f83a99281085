# SPDX-License-Identifier: Apache-2.0
"""The numbers of a finished job, in one dictionary: ``summary.json``, the table and the result file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ub_dynamic.groups import Group
from ub_dynamic.testing.results import command_line, write_result

from .job import Work
from .ranks import total, transport
from .train import Run

_FIGURES = (
    "saved_token_fraction",
    "allocations_after_start",
    "shape_changes",
    "loss_first",
    "loss_last",
    "hidden_transfer_fraction",
)


def summarise(settings: argparse.Namespace, work: Work, group: Group, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that a job shows. Collective; the times are each rank's own, the rest is the same on all."""
    padded_seconds = next((_seconds(run) for run in runs if run.mode == "pad"), None)
    return {
        "tp": group.size,
        "transport": transport(group),
        "capacity": work.capacity,
        "microbatches": len(runs[0].records),
        "documents": sum(len(packed.documents) for step in work.steps for packed in step),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(settings).items()},
        "modes": {run.mode: _mode(run, work.capacity, group, padded_seconds) for run in runs},
    }


def write_files(settings: argparse.Namespace, summary: dict[str, Any], runs: Sequence[Run]) -> list[Path]:
    """Everything that the settings ask for, on one rank; the paths, with that of the trace that all ranks wrote."""
    pictures = []
    written = [settings.out / "summary.json"]
    written[0].write_text(json.dumps({**summary, "rows": rows(runs)}, indent=1) + "\n")
    if settings.trace:
        written.append(settings.trace)
    if settings.result:
        written.append(_write_demo_result(summary, runs))
        pictures.append(written[-1].with_suffix(".png"))
    if not settings.no_plot:
        from .picture import draw

        for path in [settings.out / "tokens.png", *pictures]:
            draw(path, runs, summary["capacity"])
            written.append(path)
    return written


def _write_demo_result(summary: dict[str, Any], runs: Sequence[Run]) -> Path:
    dynamic = summary["modes"]["dynamic"]
    figures = {name: dynamic[name] for name in _FIGURES} | {"dynamic_over_pad_time": dynamic["time_over_pad"]}
    command = f"mpirun -n {summary['tp']} {command_line()}"
    return write_result("demo", figures, rows(runs), mode="cpu-mpi", command=command)


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a microbatch and mode."""
    return [
        {
            "mode": run.mode,
            "step": record.step,
            "real_tokens": record.real_tokens,
            "tokens": record.tokens,
            "seconds": round(record.seconds, 6),
        }
        for run in runs
        for record in run.records
    ]


def _mode(run: Run, capacity: int, group: Group, padded_seconds: float | None) -> dict[str, Any]:
    tokens = sum(record.tokens for record in run.records)
    padded = capacity * len(run.records)
    return {
        "real_tokens": sum(record.real_tokens for record in run.records),
        "tokens": tokens,
        "padded_tokens": padded,
        "saved_token_fraction": 1 - tokens / padded,
        "shape_changes": run.shape_changes,
        "allocations_after_start": run.allocations,
        "hidden_transfer_fraction": _hidden(run, group),
        "microbatch_seconds": _seconds(run),
        "time_over_pad": _seconds(run) / padded_seconds if padded_seconds else None,
        "seconds": run.seconds,
        "loss_first": run.losses[0],
        "loss_last": run.losses[-1],
        "losses": run.losses,
    }


def _seconds(run: Run) -> float:
    return sum(record.seconds for record in run.records)


def _hidden(run: Run, group: Group) -> float | None:
    """The mean over the ranks; None where there is nothing to transfer."""
    return total(group, run.hidden_fraction(), "averaging the trace") / group.size if group.size > 1 else None

# SPDX-License-Identifier: Apache-2.0
"""What a run shows: progress while it trains, one table at the end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .train import Run

_LINE_EVERY_S = 3.0


def make_console(settings: argparse.Namespace, rank: int) -> Console:
    """Where a job speaks: stdout, stderr with ``--json``, nowhere on ranks other than 0."""
    console = Console(stderr=settings.json, quiet=rank != 0)
    if not console.is_terminal:
        console.width = 100
    return console


class ProgressBar:
    """A bar on a terminal, else a line every few seconds (the ranks of an MPI launcher write to pipes)."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps, self._done = console, steps, 0
        self._next_line = 0.0
        self._bar: Progress | None = None
        if console.is_terminal and not console.quiet:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
                console=console,
            )
            self._task = self._bar.add_task("", total=steps, text="")

    def __enter__(self) -> ProgressBar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, run: Run) -> None:
        """One more step of ``run`` is done."""
        self._done += 1
        last = run.records[-1]
        text = f"{run.mode:<8} loss {run.losses[-1]:.3f}  T {last.tokens:>6,}"
        if self._bar:
            self._bar.update(self._task, completed=self._done, text=text)
        elif time.monotonic() > self._next_line or self._done == self._steps:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            filled = 20 * self._done // self._steps
            line = f"[{'#' * filled}{'-' * (20 - filled)}] {self._done:>3}/{self._steps}  {text}"
            self._console.print(line, markup=False, highlight=False)


def table(summary: Mapping[str, Any]) -> Table:
    """The end of a run, for reading; every number is one of ``summary.json``."""
    result = Table(
        title=f"tp = {summary['tp']} over {summary['transport']}, {summary['microbatches']} microbatches",
        title_justify="left",
    )
    result.add_column("")
    for mode in summary["modes"]:
        result.add_column(mode, justify="right")
    modes = summary["modes"].values()

    def line(label: str, key: str, form: str) -> None:
        cells = [form.format(mode[key]) if mode[key] is not None else "-" for mode in modes]
        result.add_row(label, *cells)

    line("tokens of documents", "real_tokens", "{:,}")
    line("tokens processed", "tokens", "{:,}")
    line("... of a pad-to-capacity run", "padded_tokens", "{:,}")
    line("saved", "saved_token_fraction", "{:.1%}")
    line("shape changes", "shape_changes", "{:,}")
    line("buffer allocations after start", "allocations_after_start", "{:,}")
    line("transfer time hidden behind GEMMs", "hidden_transfer_fraction", "{:.1%}")
    line("seconds in microbatches", "microbatch_seconds", "{:.2f}")
    line("... relative to pad", "time_over_pad", "{:.2f}")
    line("first loss", "loss_first", "{:.4f}")
    line("last loss", "loss_last", "{:.4f}")
    return result

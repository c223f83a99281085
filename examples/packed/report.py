# SPDX-License-Identifier: Apache-2.0
"""What a run shows: progress while it trains, one table and one picture at the end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .train import MicrobatchRecord, Run

_LINE_EVERY_S = 3.0
_COLORS = {"dynamic": "#0072b2", "pad": "#d55e00", "rebuild": "#7f7f7f"}


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


def picture(path: Path, runs: Sequence[Run], capacity: int) -> None:
    """T of every microbatch under the capacity; time against T and the loss, for the modes that ran."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
    }
    with plt.rc_context(style):
        figure, axes = plt.subplot_mosaic(
            [["tokens", "tokens"], ["time", "loss"]], figsize=(10, 6.4), layout="constrained"
        )
        _draw_tokens(axes["tokens"], _needed(runs), capacity)
        _draw_time(axes["time"], runs)
        _draw_loss(axes["loss"], runs)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _needed(runs: Sequence[Run]) -> list[MicrobatchRecord]:
    exact = [run for run in runs if run.mode != "pad"]
    return (exact or runs)[0].records


def _draw_tokens(axes: Any, records: Sequence[MicrobatchRecord], capacity: int) -> None:
    needed = [record.real_tokens for record in records]
    places = range(1, len(needed) + 1)
    saved = 1 - sum(needed) / (capacity * len(needed))
    axes.bar(
        places,
        [capacity] * len(needed),
        width=1.0,
        color="#e9e4dc",
        label=f"padding to capacity ({saved:.0%} of all tokens)",
    )
    axes.bar(places, needed, width=0.84, color=_COLORS["dynamic"], label="tokens of documents")
    axes.axhline(capacity, color="black", linewidth=1, linestyle="--")
    axes.annotate(
        f"capacity {capacity:,}", (1, capacity), xytext=(0, 4), textcoords="offset points", fontsize=9
    )
    axes.set(
        title="Tokens of each microbatch",
        xlabel="microbatch",
        ylabel="T",
        xlim=(0.4, len(needed) + 0.6),
        ylim=(0, capacity * 1.22),
    )
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper right", ncols=2, frameon=False, fontsize=9)


def _draw_time(axes: Any, runs: Sequence[Run]) -> None:
    markers = {"dynamic": "o", "pad": "s", "rebuild": "x"}
    for run in runs:
        axes.scatter(
            [record.real_tokens for record in run.records],
            [record.seconds * 1e3 for record in run.records],
            s=18,
            marker=markers[run.mode],
            color=_COLORS[run.mode],
            label=run.mode,
            linewidths=1,
            alpha=0.85,
        )
    axes.set(
        title="Time of a microbatch, forward and backward",
        xlabel="tokens of its documents",
        ylabel="ms",
        ylim=(0, None),
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, fontsize=9)


def _draw_loss(axes: Any, runs: Sequence[Run]) -> None:
    styles = {
        "dynamic": {"linewidth": 4, "alpha": 0.45},
        "pad": {"linewidth": 1.2},
        "rebuild": {"linewidth": 1.2, "linestyle": ":"},
    }
    for run in runs:
        axes.plot(
            range(1, len(run.losses) + 1),
            run.losses,
            color=_COLORS[run.mode],
            label=run.mode,
            **styles[run.mode],
        )
    axes.set(title="Loss", xlabel="optimizer step", ylabel="nats a byte")
    axes.legend(frameon=False, fontsize=9)

# SPDX-License-Identifier: Apache-2.0
"""The picture of a job: what padding to capacity would add, what each way to handle T costs, and that it learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .train import MicrobatchRecord, Run

_COLORS = {"dynamic": "#0072b2", "pad": "#d55e00", "rebuild": "#7f7f7f"}


def draw(path: Path, runs: Sequence[Run], capacity: int) -> None:
    """T of every microbatch under the capacity; time against T and the loss, for the modes that ran."""
    style = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        axes: dict[str, Any] = figure.subplot_mosaic([["tokens", "tokens"], ["time", "loss"]])
        _draw_tokens(axes["tokens"], runs[0].records, capacity)
        _draw_time(axes["time"], runs)
        _draw_loss(axes["loss"], runs)
        figure.savefig(path, dpi=160)


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
    axes.annotate(f"capacity {capacity:,}", (1, capacity), xytext=(0, 4), textcoords="offset points", fontsize=9)
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
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, fontsize=9)


def _draw_loss(axes: Any, runs: Sequence[Run]) -> None:
    styles: dict[str, dict[str, Any]] = {
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

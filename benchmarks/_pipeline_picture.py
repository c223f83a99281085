# SPDX-License-Identifier: Apache-2.0
"""The picture of pipeline_blocks.py: bytes of blocks against T with the closed form, step time, and what is held."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"plain": "#d55e00", "cached": "#0072b2"}
NAMES = {"plain": "every block sent again", "cached": "with the cache of a rank"}
MIB = 1 << 20


def draw(path: Path, answer: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """``answer``: what the ranks measured; ``figures``: those of the result file."""
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 11}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        volume, seconds, memory = figure.subplots(1, 3, width_ratios=(2.2, 1, 1.3))
        pp, vpp, blocks = (int(figures[name]) for name in ("pp", "vpp", "blocks"))
        figure.suptitle(
            f"Attention residuals over a pipeline: pp {pp}, vpp {vpp}, {blocks} blocks, H = {int(figures['hidden'])}",
            fontweight="bold",
            x=0.01,
            ha="left",
        )
        _volume(volume, answer["rows"], figures)
        _seconds(seconds, answer["seconds"])
        _memory(memory, figures)
        figure.savefig(path, dpi=160)


def _volume(axes: Axes, rows: list[dict[str, Any]], figures: Mapping[str, float]) -> None:
    top = max(row["tokens"] for row in rows)
    for mode, colour in COLOURS.items():
        mine = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row["tokens"])
        slope = mine[-1]["closed_form_bytes"] / mine[-1]["tokens"] / MIB
        form = "sum of C-1-s" if mode == "plain" else "sum of min(P-1, C-1-s)"
        count = int(figures[f"closed_form_{mode}"])
        axes.plot([0, top], [0, slope * top], color=colour, linewidth=1, label=f"closed form, {form}: {count} blocks")
        axes.plot(
            [row["tokens"] for row in mine],
            [row["block_bytes"] / MIB for row in mine],
            "o",
            color=colour,
            label=f"on the wire, {NAMES[mode]}",
        )
    axes.set(
        title="Blocks and their gradients, each microbatch",
        xlabel="T of the microbatch",
        ylabel="MiB, all ranks",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.legend(frameon=False, fontsize=9)


def _seconds(axes: Axes, seconds: Mapping[str, list[float]]) -> None:
    for place, (mode, times) in enumerate(seconds.items()):
        ordered = sorted(1e3 * value for value in times)
        median = ordered[len(ordered) // 2]
        axes.bar(place, median, width=0.6, color=COLOURS[mode], alpha=0.35)
        axes.plot([place] * len(ordered), ordered, "o", color=COLOURS[mode], markersize=4)
        axes.annotate(
            f"{median:,.0f}", (place, median), xytext=(10, 2), textcoords="offset points", ha="left", fontsize=9
        )
    axes.set_xticks(range(len(seconds)), list(seconds))
    axes.set(title="Step, median and each run", ylabel="ms", ylim=(0, None))


def _memory(axes: Axes, figures: Mapping[str, float]) -> None:
    """Side by side, not stacked: blocks that came from another rank lie in its receive buffers."""
    for place, mode in enumerate(COLOURS):
        for offset, what, alpha in ((-0.21, "buffer_bytes", 0.85), (0.21, "store_peak_bytes", 0.4)):
            size = figures[f"{what}_{mode}"] / MIB
            axes.bar(place + offset, size, width=0.4, color=COLOURS[mode], alpha=alpha)
            name = "receive\nbuffers" if what == "buffer_bytes" else "store\n(peak)"
            axes.text(place + offset, size, f"{size:,.1f}\n{name}", ha="center", va="bottom", fontsize=8)
    axes.margins(y=0.25)
    axes.set_xticks(range(len(COLOURS)), list(COLOURS))
    axes.set(title="Held by the fullest rank", ylabel="MiB")

# SPDX-License-Identifier: Apache-2.0
"""A pipeline schedule as a picture: passes of every rank on a time axis, and how many microbatches each one holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..pipeline.timeline import Timeline

_INK, _IDLE = "#222222", "#f1f1f1"
_MAPS = {"forward": "Blues", "backward": "Oranges"}


def draw(found: Timeline, title: str, path: Path) -> None:
    """Write the picture of `found` to `path`, in the format that its suffix names."""
    height = 1.9 + 0.55 * found.pp + 1.7
    figure = Figure(figsize=(13, height), layout="constrained")
    passes, held = figure.subplots(2, 1, sharex=True, height_ratios=(0.55 * found.pp + 0.3, 1.5))
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    _draw_passes(passes, found)
    _draw_held(held, found)
    figure.legend(handles=_legend(found), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _draw_passes(axes: Axes, found: Timeline) -> None:
    for bar in found.bars:
        width = bar.end - bar.start
        colour = _colour(bar.action.kind, bar.action.chunk, found.vpp)
        box = Rectangle((bar.start, bar.rank - 0.42), width, 0.84, facecolor=colour, edgecolor="white", linewidth=0.8)
        axes.add_patch(box)
        if width > found.duration / 160:
            axes.text(
                bar.start + width / 2,
                bar.rank,
                str(bar.action.microbatch),
                ha="center",
                va="center",
                fontsize=max(6.0, min(10.0, 480 * width / found.duration)),
                color=_readable_on(colour),
            )
    for rank in range(found.pp):
        axes.text(
            1.005 * found.duration,
            rank,
            f"idle {100 * found.bubble(rank):.1f} %",
            va="center",
            fontsize=9,
            color=_INK,
        )
    axes.set_xlim(0, found.duration)
    axes.set_ylim(found.pp - 0.45, -0.55)
    axes.set_yticks(range(found.pp), [f"rank {rank}" for rank in range(found.pp)])
    axes.set_facecolor(_IDLE)
    _bare(axes)


def _draw_held(axes: Axes, found: Timeline) -> None:
    shades = colormaps["viridis"]
    for rank in range(found.pp):
        times, counts = [0.0], [0]
        for bar in found.of_rank(rank):
            times.append(bar.end)
            counts.append(counts[-1] + (1 if bar.action.kind == "forward" else -1))
        colour = shades(0.8 * rank / max(1, found.pp - 1))
        axes.step(times, counts, where="post", color=colour, linewidth=1.4)
        top = max(counts)
        axes.plot(times[counts.index(top)], top, "o", markersize=3, color=colour)
        axes.annotate(
            f"rank {rank}: {top}",
            (times[counts.index(top)], top),
            xytext=(3, 2),
            textcoords="offset points",
            fontsize=8,
            color=colour,
        )
    axes.set_ylim(bottom=0)
    axes.margins(y=0.18)
    axes.set_ylabel("microbatches held")
    axes.set_xlabel("time, in average forward passes")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(found: Timeline) -> list[Patch]:
    kinds = [kind for kind in _MAPS if any(bar.action.kind == kind for bar in found.bars)]
    chunks = range(found.vpp)
    return [
        Patch(label=f"{kind}, chunk {chunk}" if found.vpp > 1 else kind, facecolor=_colour(kind, chunk, found.vpp))
        for kind in kinds
        for chunk in chunks
    ] + [Patch(label="idle (numbers: microbatches)", facecolor=_IDLE, edgecolor="#9a9a9a")]


def _colour(kind: str, chunk: int, vpp: int) -> Any:
    """Darker for later chunks."""
    return colormaps[_MAPS[kind]](0.35 + 0.45 * (chunk / (vpp - 1) if vpp > 1 else 0.2))


def _readable_on(colour: Any) -> str:
    red, green, blue = colour[:3]
    return _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)

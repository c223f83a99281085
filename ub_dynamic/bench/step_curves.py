# SPDX-License-Identifier: Apache-2.0
"""The curves of ``tp-step``: the time of a training step against T, an arm a line, and the ratios of arms below.

A panel for each tp, layer and H of the rows. *In proportion to T* is the padded step times ``T / capacity``: what a
step would take whose time follows its tokens. Bars are ``*_spread_ms`` of a row, where it has them, and the 95 %
intervals of ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = Mapping[str, Any]

_ARMS = {
    "pad": ("#8c8c8c", "padded to capacity"),
    "none": ("#e45756", "without overlap"),
    "exact": ("#54a24b", "buffers made for exactly T"),
    "policy": ("#7a5ba6", "with a policy"),
    "dynamic": ("#4c78a8", "dynamic"),
}
_RATIOS = {"active_over_exact": ("exact", "dynamic / exact"), "active_over_none": ("none", "dynamic / none")}
_INK = "#222222"


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the picture of the rows of ``kind`` "step" (see :mod:`.tp_step`) to ``path``, in the format that its
    suffix names. ValueError without such a row.
    """
    panels: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("kind") == "step" and "dynamic_ms" in row:
            panels.setdefault((row["tp"], row["layer"], row["hidden"]), []).append(row)
    if not panels:
        raise ValueError(f"no row of kind 'step' with dynamic_ms among {len(rows)}: nothing to draw")
    figure = Figure(figsize=(5.4 * len(panels), 5.6), layout="constrained")
    grid: Any = figure.subplots(2, len(panels), squeeze=False, sharex="col", height_ratios=(3, 1))
    for column, ((tp, layer, hidden), found) in enumerate(sorted(panels.items())):
        found.sort(key=lambda row: row["tokens"])
        times, ratios = grid[0][column], grid[1][column]
        times.set_title(f"tp {tp}, {layer}, H {hidden:,}", fontsize=10, loc="left")
        _draw_times(times, found)
        _draw_ratios(ratios, found)
        for axes in (times, ratios):
            axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    handles = {
        label: handle for axes in grid[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _draw_times(axes: Axes, rows: Sequence[Row]) -> None:
    for arm, (colour, label) in _ARMS.items():
        measured = [row for row in rows if f"{arm}_ms" in row]
        if measured:
            axes.errorbar(
                [row["tokens"] for row in measured],
                [row[f"{arm}_ms"] for row in measured],
                [row.get(f"{arm}_spread_ms", 0.0) for row in measured],
                fmt="o-",
                color=colour,
                markersize=4,
                linewidth=1.4,
                capsize=2,
                label=label,
            )
    padded = [row for row in rows if "pad_ms" in row]
    if padded:
        whole = statistics.median(row["pad_ms"] for row in padded)
        capacity = padded[-1]["tokens"] / padded[-1]["capacity_fraction"]
        axes.plot([0, capacity], [0, whole], "--", color=_INK, linewidth=0.9, label="in proportion to T")
    axes.set_ylabel("ms a step, median")
    axes.set_xlim(0, None)
    axes.set_ylim(0, None)


def _to_the_ends(row: Row, key: str) -> tuple[float, float]:
    """From a ratio down and up to the ends of its interval; older rows have half its width alone."""
    if (half := row.get(f"{key}_interval")) is not None:
        return half, half
    return row[key] - row[f"{key}_low"], row[f"{key}_high"] - row[key]


def _draw_ratios(axes: Axes, rows: Sequence[Row]) -> None:
    """In the colour of the arm that dynamic is compared with, and with 95 % intervals."""
    for key, (arm, label) in _RATIOS.items():
        measured = [row for row in rows if key in row]
        if measured:
            axes.errorbar(
                [row["tokens"] for row in measured],
                [row[key] for row in measured],
                [*zip(*(_to_the_ends(row, key) for row in measured), strict=True)],
                fmt="o-",
                color=_ARMS[arm][0],
                markersize=4,
                linewidth=1.2,
                capsize=3,
                label=label,
            )
    axes.axhline(1.0, color=_INK, linewidth=0.7)
    axes.set_xlabel("T, tokens of the TP group")
    axes.set_ylabel("dynamic over\nthe other arm")

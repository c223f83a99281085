# SPDX-License-Identifier: Apache-2.0
"""The curves of a tuning table: per GEMM, the time of each method over the GEMM alone, against T."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..tuning_table import TuningRow, TuningTable
from .operations import GEMMS
from .tuned import best_of, chosen_us

_COLOURS = {"none": "#8c8c8c", "bulk": "#4c78a8", "ring_exchange": "#54a24b", "pipeline": "#e45756"}
_INK = "#222222"


def draw(table: TuningTable, path: Path) -> None:
    """Write the picture to ``path``, in the format that its suffix names."""
    gemms = [name for name in GEMMS if any(row.gemm == name and row.gemm_us for row in table.rows)]
    columns = min(4, max(1, len(gemms)))
    lines = -(-max(1, len(gemms)) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.9 * lines + 1.1), layout="constrained")
    panels: Any = figure.subplots(lines, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_visible(False)
    for name, axes in zip(gemms, panels.flat, strict=False):
        axes.set_visible(True)
        _panel(axes, name, sorted((row for row in table.rows if row.gemm == name), key=lambda row: row.tokens))
    figure.suptitle(
        f"Time over the GEMM alone: H {table.hidden}, ffn {table.ffn}, tp {table.tp}, {table.mode}, {table.machine}",
        fontsize=10,
        fontweight="bold",
    )
    handles = {
        label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, name: str, rows: list[TuningRow]) -> None:
    measured = [row for row in rows if row.gemm_us and row.candidates]
    for method, colour in _COLOURS.items():
        points = [(row.tokens, best_of(row)[method] / row.gemm_us) for row in measured if method in best_of(row)]  # type: ignore[operator]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1.3, label=method)
    chosen = [(row.tokens, value / row.gemm_us) for row in measured if (value := chosen_us(row)) and row.gemm_us]
    if chosen:
        axes.plot(*zip(*chosen, strict=True), "o", color=_INK, markersize=8, fillstyle="none", label="chosen")
    axes.axhline(1.0, color=_INK, linewidth=0.7)
    axes.set_xscale("log", base=2)
    axes.set_title(f"{name} ({GEMMS[name].operation})", fontsize=9)
    axes.set_xlabel("T", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)

# SPDX-License-Identifier: Apache-2.0
"""A chunk layout as a picture: the registered memory as bars, and the same chunks as parts of the matrix.

Above, memory from the first to the last registered byte, once at the active shape and once at capacity, so that
one sees how chunks move when T changes. Below, the view that a GEMM sees. What the active shape leaves alone is
hatched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..shapes import Chunk, ChunkLayout, chunk_layout, registered_rows
from .layout_words import role, title

_UNUSED: dict[str, Any] = {"facecolor": "#f4f4f4", "edgecolor": "#9a9a9a", "hatch": "///", "linewidth": 0.6}
_ROLES = {
    "GEMM output, sent": "#8fb8de",
    "own GEMM output, summed": "#6cc2b5",
    "received and summed": "#f2a65a",
}
_INK = "#222222"


def draw(found: ChunkLayout, path: Path) -> None:
    """Write the picture of `found` to `path`, in the format that its suffix names."""
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    memory, matrix = figure.subplots(2, 1, height_ratios=(1.25, 2.2))
    figure.suptitle(title(found), fontsize=12, fontweight="bold", x=0.01, ha="left")
    _draw_memory(memory, found)
    _draw_matrix(matrix, found)
    figure.legend(handles=_legend(found), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _draw_memory(axes: Axes, found: ChunkLayout) -> None:
    unit, name = _unit(found.capacity_nbytes)
    full = _at_capacity(found)
    _box(axes, 0, 0.6, full.capacity_nbytes / unit, 0.8, **_UNUSED)
    for y, layout, height, alpha in ((1.0, found, 0.8, 1.0), (0.0, full, 0.5, 0.5)):
        for chunk in layout.chunks:
            x, width = chunk.offset_bytes / unit, chunk.nbytes / unit
            _box(axes, x, y - height / 2, width, height, alpha=alpha, **_fill(chunk, found))
            if chunk.nbytes > 0.025 * full.capacity_nbytes:
                axes.text(x + width / 2, y, str(chunk.index), ha="center", va="center", fontsize=9, color=_INK)
    end = found.nbytes / unit
    axes.annotate(
        f"{end:,.4g} {name} used ({100 * found.nbytes / found.capacity_nbytes:.1f} %)",
        (end, 1.42),
        (end, 1.75),
        ha="left" if end < 0.7 * full.capacity_nbytes / unit else "right",
        fontsize=9,
        arrowprops={"arrowstyle": "-", "color": _INK},
    )
    _xlim(axes, full.capacity_nbytes / unit)
    axes.set_ylim(-0.45, 2.0)
    axes.set_yticks([1.0, 0.0], [f"active\nT = {found.active[0]:,}", f"capacity\nT = {found.capacity[0]:,}"])
    axes.set_xlabel(f"offset in the registered buffer, {name}")
    _bare(axes)


def _draw_matrix(axes: Axes, found: ChunkLayout) -> None:
    hidden = found.active[1]
    rows = registered_rows(found.method, found.collective, found.capacity[0], found.tp)
    _box(axes, 0, 0, hidden, rows, **_UNUSED)
    for chunk in found.chunks:
        x, y = (chunk.index * chunk.columns, 0) if found.method == "pipeline" else (0, chunk.index * chunk.rows)
        _box(axes, x, y, chunk.columns, chunk.rows, **_fill(chunk, found))
        if chunk.rows > 0.035 * rows:
            text = f"{chunk.index}  {role(chunk, found)}" if chunk.columns == hidden else str(chunk.index)
            axes.text(
                x + chunk.columns / 2,
                y + chunk.rows / 2,
                text,
                ha="center",
                va="center",
                fontsize=9,
                color=_INK,
            )
    used = found.view_shape[0]
    _xlim(axes, hidden)
    axes.set_ylim(rows, 0)
    ends = [0, used] + ([rows] if rows - used > 0.04 * rows else [])
    axes.set_yticks(ends, [f"{end:,}" for end in ends])
    ticks = [hidden * part // 4 for part in range(5)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    what = "GEMM output, each block contiguous in memory" if found.method == "pipeline" else "view"
    axes.set_xlabel(f"columns of the {what}: [{used:,}, {hidden:,}]")
    axes.set_ylabel("rows")
    _bare(axes)


def _legend(found: ChunkLayout) -> list[Patch]:
    unused = Patch(label="registered, unused at this T", **_UNUSED)
    if found.receive_slots:
        return [
            *(Patch(label=text, facecolor=colour, edgecolor=_INK) for text, colour in _ROLES.items()),
            unused,
        ]
    chunk = found.chunks[0]
    whose = role(chunk, found).replace(str(chunk.index), "i")
    return [Patch(label=f"chunk i: {whose}", **_fill(chunk, found)), unused]


def _fill(chunk: Chunk, found: ChunkLayout) -> dict[str, Any]:
    """Colour by what a ring reduce-scatter's slot is for, else by whose chunk it is."""
    if found.receive_slots:
        colour: Any = _ROLES[role(chunk, found)]
    else:
        strong = colormaps["viridis"](chunk.index / max(1, len(found.chunks) - 1))
        colour = tuple(0.5 + 0.5 * part for part in strong[:3])  # paler, so that text can be read on it
    return {"facecolor": colour, "edgecolor": _INK, "linewidth": 0.7}


def _at_capacity(found: ChunkLayout) -> ChunkLayout:
    return chunk_layout(
        found.method,
        found.collective,
        found.capacity,
        found.capacity,
        found.tp,
        found.dtype,
        found.num_splits,
    )


def _box(axes: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    axes.add_patch(Rectangle((x, y), width, height, **style))


def _xlim(axes: Axes, end: float) -> None:
    axes.set_xlim(-0.001 * end, 1.001 * end)  # room for the outlines


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _unit(nbytes: int) -> tuple[int, str]:
    """The largest binary unit of which there are at least two."""
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2 << power:
            return 1 << power, name
    return 1, "bytes"

# SPDX-License-Identifier: Apache-2.0
"""A trace as a picture: for each rank a row of GEMMs and one of transfers, against time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..backends.host.trace import GEMM, TRANSFER, Span

_COLOURS = {"fprop": "#3b7ea1", "dgrad": "#2f9e77", "wgrad": "#7a5ba6"}
_TRANSFER, _OTHER, _INK = "#f2a65a", "#999999", "#222222"
_MOST_NAMES = 12  # operations of rank 0 that can be named without touching each other


def draw(spans_by_rank: Sequence[Sequence[Span]], path: Path) -> None:
    """Write the picture to ``path``, in the format that its suffix names."""
    begin = min(span.start_ns for spans in spans_by_rank for span in spans)
    rows = [(rank, track) for rank in range(len(spans_by_rank)) for track in (GEMM, TRANSFER)]
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, (rank, track) in enumerate(rows):
        for span in spans_by_rank[rank]:
            if span.track == track:
                axes.barh(
                    row,
                    (span.end_ns - span.start_ns) / 1e6,
                    left=(span.start_ns - begin) / 1e6,
                    color=_TRANSFER if track == TRANSFER else _colour(span.name),
                    edgecolor="white",
                    linewidth=0.4,
                    height=0.8 if track == GEMM else 0.5,
                )
    axes.set_yticks(range(len(rows)), [f"rank {rank}\n{track}s" for rank, track in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _name_operations(axes, spans_by_rank[0], begin)
    handles = [Patch(color=colour, label=f"GEMMs of {name}") for name, colour in _COLOURS.items()]
    handles.append(Patch(color=_TRANSFER, label="transfers"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _colour(name: str) -> str:
    return next((colour for part, colour in _COLOURS.items() if part in name), _OTHER)


def _name_operations(axes: Axes, spans: Sequence[Span], begin: int) -> None:
    """TE's name above the GEMMs of each operation, unless there are too many of them."""
    found: list[tuple[str, int, int]] = []
    for span in sorted((span for span in spans if span.track == GEMM), key=lambda span: span.start_ns):
        name = re.sub(r" (chunk|block) \d+$", "", span.name).replace(" ", "_")
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1], span.end_ns)
        else:
            found.append((name, span.start_ns, span.end_ns))
    for name, first, last in found if len(found) <= _MOST_NAMES else ():
        middle = ((first + last) / 2 - begin) / 1e6
        axes.text(middle, -0.5, name, ha="center", va="bottom", fontsize=8, color=_INK)

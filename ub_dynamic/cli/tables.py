# SPDX-License-Identifier: Apache-2.0
"""A table where the terminal is wide enough for its columns, else its rows one below the other, a cell a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_LEAST_OF_SHRINKING = 24


def show_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Iterable[str] = (),
    shrinks: str | None = None,
    title: str | None = None,
) -> None:
    """Print ``rows``, in each of which a cell belongs to a column; no cell is broken into pieces.

    ``left``: columns of words, the others are numbers. ``shrinks``: a column whose text may be cut where it does not
    fit; below it says all.
    """
    cells = [[Text(cell) for _, cell in zip(columns, row, strict=True)] for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        justify: Any = "left" if column in {*left, shrinks} else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in cells:
        table.add_row(*row)
    excess = Measurement.get(console, console.options.update(width=100_000), table).maximum - console.width
    if excess > 0 and shrinks is not None:
        index = columns.index(shrinks)
        room = max((len(row[index]) for row in cells), default=0) - excess
        if room >= _LEAST_OF_SHRINKING:
            table.columns[index].max_width, excess = room, 0
    if excess <= 0:
        console.print(table)
        return
    if title is not None:
        console.print(Text(title, style="bold"))
    for row in cells:
        console.print(_below_each_other(columns, row))
        console.print()


def _below_each_other(columns: Sequence[str], row: Sequence[Text]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for column, cell in zip(columns, row, strict=True):
        grid.add_row(column, cell)
    return grid

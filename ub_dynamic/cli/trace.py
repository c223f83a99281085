# SPDX-License-Identifier: Apache-2.0
"""`trace`: what ran when on each rank of the host backend, from a file of `backends.host.trace`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import UBUnsupportedError
from .files import PictureFile, check_apart, refuse, writing


def trace(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Of trace.save or gather_and_save")],
    between: Annotated[
        str | None, typer.Option(help="Milliseconds from the first span, as in 120:180; default all")
    ] = None,
    out: PictureFile = None,
) -> None:
    """Show how busy each rank was with GEMMs and transfers, and how much of the transfers the GEMMs hid.

    Example: python -m ub_dynamic trace trace.json --between 0:50 --out timeline.svg

    The file itself is for https://ui.perfetto.dev.
    """
    from ..backends.host.trace import GEMM, TRANSFER, Span, busy_seconds, hidden_fraction, load

    def cut(spans: Sequence[Span], first: float, last: float) -> list[Span]:
        return [span for span in spans if first <= (span.start_ns - begin) / 1e6 and (span.end_ns - begin) / 1e6 < last]

    check_apart(file=file, out=out)
    first, last = _window(between)
    try:
        ranks = load(file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except UBUnsupportedError as error:
        refuse("trace", error)
    begin = min((span.start_ns for spans in ranks for span in spans), default=0)
    shown = [cut(spans, first, last) for spans in ranks]
    if not any(shown):
        raise typer.BadParameter(f"nothing ran {f'between {between} ms' if between else f'in {file}'}")
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("rank", "GEMMs", "ms", "transfers", "ms", "MiB sent", "hidden"):
        table.add_column(column, justify="right")
    for rank, spans in enumerate(shown):
        table.add_row(
            str(rank),
            *(
                word
                for track in (GEMM, TRANSFER)
                for word in (str(sum(s.track == track for s in spans)), f"{1e3 * busy_seconds(spans, track):.2f}")
            ),
            f"{sum(span.nbytes for span in spans) / 2**20:.2f}",
            f"{hidden_fraction(spans):.1%}",
        )
    console.print(table)
    if out is not None:
        from .trace_picture import draw

        with writing("trace", out):
            draw(shown, out)
        console.print(f"Drawn to {out}", highlight=False)


def _window(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, float("inf")
    try:
        first, last = (float(word) for word in text.split(":"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not FIRST:LAST in milliseconds, as in 120:180") from None
    if not 0 <= first < last:
        raise typer.BadParameter(f"{text!r}: the first has to be at least 0 and below the last, as in 120:180")
    return first, last

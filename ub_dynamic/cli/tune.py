# SPDX-License-Identifier: Apache-2.0
"""`tune`: measure which overlap is best for each GEMM at each T here, and write the table for `initialize_ub`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.asked import rounded
from ..bench.start import mode_of
from ..bench.tuned import GrowingTable, chosen_us, default_us, header
from ..bench.worlds import BackendName
from ..errors import UBDynamicError
from ..tuning_table import TuningRow
from .files import PictureFile, check_apart, refuse, writing
from .measuring import (
    SECONDS,
    Backend,
    Ffn,
    Hidden,
    Tokens,
    Watched,
    check_backend,
    checked,
    gemm_names,
    sizes,
    token_list,
)
from .tables import show_table


def tune(
    out: Annotated[Path, typer.Option(dir_okay=False, help="The table; one that matches is taken up again")],
    backend: Backend = "host",
    tp: Annotated[int, typer.Option(min=2, help="Ranks of the TP group")] = 2,
    hidden: Hidden = None,
    ffn: Ffn = None,
    tokens: Tokens = None,
    gemms: Annotated[str | None, typer.Option(help="As in fc1_fprop,fc2_fprop; default all eight")] = None,
    seconds: Annotated[float, typer.Option(min=1, help=f"{SECONDS} What is not reached keeps the default")] = 300,
    restart: Annotated[bool, typer.Option("--restart", help="Overwrite a table that is there already")] = False,
    plot: PictureFile = None,
) -> None:
    """Measure the overlap candidates of every GEMM at every T, and write the table that a policy is made from.

    Example: python -m ub_dynamic tune --backend te --hidden 4096 --ffn 16384 --tp 2 --tokens 512:16384 --out table.json

    Use it with initialize_ub(..., policy="table.json"). A candidate replaces the default only if the whole 95 %
    interval of its time over the default's lies below 1. The table is written after every cell, so a run can be
    ended at any time and taken up again.
    """  # fmt: skip
    check_apart(out=out, plot=plot)
    if str(out) == "always":
        refuse("--out", "policy='always' means something else than the table; name it with .json, as in table.json")
    chosen = check_backend(backend)
    size, between = sizes(chosen, hidden, ffn)
    options = {
        "hidden": size,
        "ffn": between,
        "tokens": token_list(tokens, chosen, tp, size),
        "gemms": gemm_names(gemms),
        "seconds": seconds,
    }
    checked("tune", "tune", options, chosen, tp)
    try:
        dtype = "bfloat16" if chosen == "te" else "float32"
        growing = GrowingTable(out, header(tp, size, between, dtype, mode_of(chosen, tp)), restart)
    except UBDynamicError as error:
        refuse("tune", error)
    with growing:
        _run(growing, options, chosen, tp, restart, plot)


def _run(
    growing: GrowingTable, options: dict[str, Any], chosen: BackendName, tp: int, restart: bool, plot: Path | None
) -> None:
    watched = Watched("tune", on_row=growing.take)
    out = growing.path
    if growing.done:
        watched.console.print(f"{out} has {len(growing.done)} measured cells already; they are kept", highlight=False)
    watched.run("tune", {**options, "done": growing.done}, chosen, tp, options["seconds"])
    table = growing.table
    _show(watched, table.rows)
    watched.console.print(f'Written to {out}: initialize_ub(..., policy="{out}")', highlight=False)
    asked = {(gemm, count) for gemm in options["gemms"] for count in rounded(options, chosen, tp)}
    if asked - set(growing.done):
        same = "the same command without --restart" if restart else "the same command"
        watched.console.print(f"Not every cell is measured: {same} goes on with the others", highlight=False)
    if plot is not None:
        from ..bench.curves import draw

        with writing("tune", plot):
            draw(table, plot)
        watched.console.print(f"Drawn to {plot}", highlight=False)
    if watched.exit_status:
        raise typer.Exit(watched.exit_status)


def _show(watched: Watched, rows: tuple[TuningRow, ...]) -> None:
    columns = ("GEMM", "T", "chosen", "us", "over default", "over GEMM alone", "why")
    cells = []
    for row in rows:
        mine, default = chosen_us(row), default_us(row)
        over = _number(mine / default if mine and default else None, "{:.3f}")
        limit = _number(mine / row.gemm_us if mine and row.gemm_us else None, "{:.3f}")
        cells.append((row.gemm, str(row.tokens), str(row.chosen), _number(mine, "{:.1f}"), over, limit, row.reason))
    show_table(watched.console, columns, cells, left=("GEMM", "chosen"), shrinks="why")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)

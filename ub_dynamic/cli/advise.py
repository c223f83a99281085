# SPDX-License-Identifier: Apache-2.0
"""`advise`: what a workload, known by the lengths of its documents, would gain from an active shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import Progress

from ..errors import UBDynamicError
from .files import PictureFile, check_apart, writing
from .tables import show_table

if TYPE_CHECKING:
    from ..advise import Distribution, Report, Workload
    from ..advise.reading import OnProgress
    from ..advise.report import Plan, StepTime


def advise(
    lengths: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="One length a line, JSONL or Parquet")],
    capacity: Annotated[int, typer.Option(help="T that communicators are registered for: rows of a TP group")],
    tp: Annotated[int, typer.Option(help="Ranks of the tensor-parallel group")] = 1,
    cp: Annotated[int, typer.Option(help="Ranks of the context-parallel group")] = 1,
    hidden: Annotated[int | None, typer.Option(help="H: shows the bytes of the buffers")] = None,
    plan: Annotated[str, typer.Option(help="packed: best fit; fixed: --documents a microbatch, in order")] = "packed",
    documents: Annotated[int, typer.Option(help="Documents of a fixed microbatch")] = 4,
    window: Annotated[int, typer.Option(help="Documents that are packed together: a global batch")] = 1024,
    buckets: Annotated[str, typer.Option(help="Numbers of buckets to show, as in 4 or 2,4,8")] = "2,4,8,16",
    field: Annotated[str, typer.Option(help="JSON field or Parquet column: an integer, or a list, as input_ids is")] = (
        "length"
    ),
    table: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A tuner's table: predicts times from it")
    ] = None,
    out: PictureFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables")] = False,
) -> None:
    """Say what microbatches of these documents cost: padded to capacity, to a few buckets, and with exact T.

    Example: python -m ub_dynamic advise lengths.txt --capacity 16384 --tp 4 --cp 2 --hidden 4096 --out f.svg

    Exits 2, naming the line and the value, for a file that holds something else than lengths.
    """
    check_apart(lengths=lengths, out=out)
    check_apart(table=table, out=out)
    if find_spec("numpy") is None:
        raise typer.BadParameter("advise needs numpy: pip install 'ub_dynamic[advise]'")
    from .. import advise as room

    try:
        workload = room.Workload(capacity, tp, cp, hidden, cast("Plan", plan), window, documents)
        step_time = None if table is None else _step_time(table, workload)
        with _progress(lengths) as on_progress:
            blocks = room.read_lengths(lengths, field, on_progress)
            found = room.advise(blocks, workload, buckets=_counts(buckets), step_time=step_time)
    except UBDynamicError as error:
        typer.echo(f"advise: {error}", err=True)
        raise typer.Exit(2) from error
    advice = room.advice(found)
    if as_json:
        typer.echo(json.dumps(_record(found, advice), indent=1))
    else:
        _show(Console(), found, advice, "token ratio" if table is None else f"GEMMs of {table}")
    if out is not None:
        from .advise_picture import draw

        with writing("advise", out):
            draw(found, out)
        typer.echo(f"Drawn to {out}", err=as_json)


def _counts(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers, as in 2,4,8", param_hint="--buckets") from None


def _step_time(path: Path, workload: Workload) -> StepTime:
    from ..advise.step_time import measured_step_time
    from ..tuning_table import TuningTable

    return measured_step_time(TuningTable.load(path), workload)


@contextmanager
def _progress(path: Path) -> Iterator[OnProgress]:
    """A bar on the terminal's stderr that is gone at the end; nothing where there is no terminal."""
    from ..advise.reading import size_of

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(path.name, total=size_of(path))
        yield lambda done: progress.update(task, completed=done)


def _record(found: Report, advice: list[str]) -> dict[str, Any]:
    asked = found.workload
    return {
        "workload": {name: getattr(asked, name) for name in asked.__dataclass_fields__},
        "documents": len(found.lengths),
        "real_tokens": found.real_tokens,
        "longest_document": found.lengths.largest,
        "microbatches": len(found.tokens),
        "fewest_microbatches": found.fewest,
        "too_long_documents": found.too_long,
        "too_large_microbatches": found.too_large,
        "tokens": _quantiles(found.tokens),
        "buffer_bytes": found.buffer_bytes,
        "buffer_bytes_of_largest": found.needed_bytes,
        "strategies": [vars(each) for each in found.strategies],
        "advice": advice,
    }


def _quantiles(values: Distribution) -> dict[str, float]:
    from ..advise.report import QUANTILES

    return {f"q{100 * share:g}": values.quantile(share) for share in QUANTILES} | {"mean": values.mean}


def _show(console: Console, found: Report, advice: list[str], predicted_by: str) -> None:
    asked = found.workload
    how = (
        f"best fit within windows of {asked.window:,} documents"
        if asked.plan == "packed"
        else f"{asked.documents} documents each, in order"
    )
    console.print(
        f"{len(found.lengths):,} documents, {found.real_tokens:,} tokens in {len(found.tokens):,} microbatches: {how}; "
        f"capacity {asked.capacity:,}, tp {asked.tp}, cp {asked.cp}",
        highlight=False,
    )
    one = "" if asked.cp == 1 else " on a CP rank"
    _table(console, f"T of a microbatch{one}", [_quantiles(found.tokens)], lambda value: f"{value:,.0f}")
    tokens = "rows of a CP rank" if one else "tokens"
    rows = [
        {
            "shapes": each.name,
            tokens: f"{each.tokens:,}",
            "waste": f"{each.waste:.2%}",
            "step time": f"{each.time_ratio:.4f}",
            "CUDA graphs": f"{each.graphs:,}",
        }
        for each in found.strategies
    ]
    _table(console, f"What each way of shaping costs (step time: {predicted_by})", rows, str)
    if found.buffer_bytes:
        from ..advise.sentences import mebibytes

        size = mebibytes(found.buffer_bytes)
        console.print(f"TE's default communicators in BF16 register {size} on each rank.", highlight=False)
    for sentence in advice:
        console.print(f"- {sentence}", markup=False, highlight=False)


def _table(console: Console, title: str, rows: list[dict[str, Any]], shown: Any) -> None:
    cells = [list(map(shown, row.values())) for row in rows]
    show_table(console, list(rows[0]), cells, left=("shapes",), title=title)

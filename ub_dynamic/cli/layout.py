# SPDX-License-Identifier: Apache-2.0
"""`layout`: the chunks of one communicator at one active shape, as a table and as a picture."""

from __future__ import annotations

import re
from typing import Annotated, cast

import torch
import typer
from rich.console import Console

from ..errors import UBDynamicError
from ..rules import check_spec, check_tokens, token_rule
from ..shapes import COLLECTIVES, METHODS, ChunkLayout, Collective, CommSpec, Method
from .files import PictureFile, writing
from .layout_words import role, title
from .tables import show_table

_DTYPES = ("bfloat16", "float16", "float32", "uint8")


def layout(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}")],
    collective: Annotated[str, typer.Option(help=f"One of {', '.join(COLLECTIVES)}")],
    capacity: Annotated[str, typer.Option(help="Registered shape, tokens x hidden size, as in 8192x4096")],
    tokens: Annotated[int, typer.Option(help="Active tokens T")],
    tp: Annotated[int, typer.Option(help="Ranks of the tensor-parallel group")],
    dtype: Annotated[str, typer.Option(help=f"{', '.join(_DTYPES)} (an FP8 buffer)")] = "bfloat16",
    num_splits: Annotated[int, typer.Option(help="Column blocks of method pipeline")] = 4,
    num_sm: Annotated[int, typer.Option(help="SMs that copy, where use_ce is off")] = 16,
    use_ce: Annotated[bool, typer.Option("--use-ce/--no-use-ce", help="Copy engines in a ring")] = True,
    out: PictureFile = None,
) -> None:
    """Show where the bytes of an active shape lie in a registered buffer.

    Example: python -m ub_dynamic layout --method ring_exchange --collective rs --capacity 8192x4096
    --tokens 3072 --tp 4 --out ring.svg

    Exits 1 when Transformer Engine's kernels would not take this T, 2 when there is no such layout.
    """
    shape = _shape(capacity)
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(_DTYPES)}", param_hint="--dtype")
    spec = CommSpec(
        "layout",
        cast(Method, method),
        cast(Collective, collective),
        shape,
        tp,
        getattr(torch, dtype),
        num_splits,
        num_sm,
        use_ce,
    )
    try:
        found = spec.layout(tokens)
    except UBDynamicError as error:
        typer.echo(f"layout: {error}", err=True)
        raise typer.Exit(2) from error
    console = Console()
    _show(console, found)
    refused = _refusal(spec, tokens)
    if refused:
        console.print(f"[red]TE's kernels would not take it:[/] {refused}", highlight=False)
    else:
        rule = token_rule(spec)
        text = f"Valid T here: multiples of {rule.multiple} from {rule.minimum} to {rule.maximum}."
        console.print(text, highlight=False)
    if out is not None:
        from .layout_picture import draw

        with writing("layout", out):
            draw(found, out)
        console.print(f"Drawn to {out}", highlight=False)
    raise typer.Exit(1 if refused else 0)


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\s*[x,]\s*(\d+)", text.strip().strip("[]()"))
    if match is None:
        raise typer.BadParameter(f"{text!r} is not TOKENSxHIDDEN, as in 8192x4096", param_hint="--capacity")
    return int(match[1]), int(match[2])


def _refusal(spec: CommSpec, tokens: int) -> str | None:
    if spec.method == "external":
        return None
    try:
        check_spec(spec)
        check_tokens(spec, tokens)
    except UBDynamicError as error:
        return str(error).removeprefix("layout ")
    return None


def _show(console: Console, found: ChunkLayout) -> None:
    columns = ("chunk", "holds", "rows", "columns", "offset", "byte offset", "bytes")
    rows = []
    for chunk in found.chunks:
        numbers = (chunk.rows, chunk.columns, chunk.offset, chunk.offset_bytes, chunk.nbytes)
        rows.append((str(chunk.index), role(chunk, found), *(f"{number:,}" for number in numbers)))
    show_table(console, columns, rows, left=("holds",), title=title(found))
    share = 100 * found.nbytes / found.capacity_nbytes
    console.print(
        f"View {list(found.view_shape)}. {found.nbytes:,} of {found.capacity_nbytes:,} registered bytes "
        f"are used ({share:.1f} %).\nA rank owns c = {found.local_numel:,} elements and sends {found.wire_numel:,}.",
        highlight=False,
    )

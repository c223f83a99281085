# SPDX-License-Identifier: Apache-2.0
"""`schedule`: what every rank of a pipeline does when, as a table and as a picture."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..errors import UBDynamicError
from ..pipeline import BlockRoutes
from ..pipeline.schedules import ScheduleName
from ..pipeline.timeline import Timeline, timeline, token_cost, unit_cost
from .files import PictureFile, writing
from .tables import show_table


def schedule(
    pp: Annotated[int, typer.Option(help="Ranks of the pipeline")],
    microbatches: Annotated[int, typer.Option(help="Microbatches of one step")],
    vpp: Annotated[int, typer.Option(help="Chunks of the model on a rank; more than 1 is interleaved 1F1B")] = 1,
    tokens: Annotated[
        str | None, typer.Option(help="T of every microbatch, as in 512,2048,64: a pass takes time in proportion")
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Inference: no backward")] = False,
    blocks: Annotated[
        str | None,
        typer.Option(help="Stages that commit a block of attention residuals, as in 0,3,7,11: counts transfers"),
    ] = None,
    out: PictureFile = None,
) -> None:
    """Show a pipeline schedule: 1F1B, or interleaved 1F1B with several chunks on a rank.

    Example: python -m ub_dynamic schedule --pp 4 --vpp 2 --microbatches 8 --out f.svg

    A backward takes twice as long as a forward here, and transfers take no time.
    """
    name: ScheduleName = "forward" if forward_only else "interleaved" if vpp > 1 else "1f1b"
    sizes = _numbers(tokens, "--tokens", smallest=1)
    if sizes and len(sizes) != microbatches:
        raise typer.BadParameter(f"{len(sizes)} numbers for {microbatches} microbatches", param_hint="--tokens")
    try:
        found = timeline(name, pp, vpp, microbatches, token_cost(sizes) if sizes else unit_cost)
        routes = [_routes(blocks, pp, vpp, cache) for cache in (False, True)] if blocks else []
    except UBDynamicError as error:
        typer.echo(f"schedule: {error}", err=True)
        raise typer.Exit(2) from error
    console = Console()
    title = _title(name, pp, vpp, microbatches, sizes)
    _show(console, found, title)
    if routes:
        plain, cached = (route.blocks_sent() for route in routes)
        console.print(
            f"Blocks sent per microbatch and direction: {plain} without the cache of a rank, {cached} with it.",
            highlight=False,
        )
    if out is not None:
        from .schedule_picture import draw

        with writing("schedule", out):
            draw(found, title, out)
        console.print(f"Drawn to {out}", highlight=False)


def _title(name: ScheduleName, pp: int, vpp: int, microbatches: int, sizes: list[int]) -> str:
    words = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B", "forward": "forward only"}
    listed = ", ".join(str(size) for size in sizes)
    varied = f", T = {listed}" if 0 < len(sizes) <= 12 else f", T up to {max(sizes)}" if sizes else ""
    return f"{words[name]}: pp {pp}, vpp {vpp}, {microbatches} microbatches{varied}"


def _numbers(text: str | None, option: str, smallest: int) -> list[int]:
    try:
        numbers = [int(word) for word in (text or "").replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers, as in 3,1,2", param_hint=option) from None
    if any(number < smallest for number in numbers):
        raise typer.BadParameter(f"{min(numbers)} is below {smallest}", param_hint=option)
    return numbers


def _routes(text: str, pp: int, vpp: int, cache: bool) -> BlockRoutes:
    stages = _numbers(text, "--blocks", smallest=0)
    if max(stages) >= pp * vpp:
        raise typer.BadParameter(f"there is no stage {max(stages)} of {pp * vpp}", param_hint="--blocks")
    return BlockRoutes(pp, tuple(stages.count(stage) for stage in range(pp * vpp)), cache)


def _show(console: Console, found: Timeline, title: str) -> None:
    columns = ("rank", "stages", "forwards first", "passes", "busy", "idle", "held at most")
    rows = []
    for rank in range(found.pp):
        bars = found.of_rank(rank)
        stages = ", ".join(str(chunk * found.pp + rank) for chunk in range(found.vpp))
        first = next((i for i, bar in enumerate(bars) if bar.action.kind == "backward"), len(bars))
        idle, held = f"{100 * found.bubble(rank):.1f} %", str(found.peak_in_flight(rank))
        rows.append((str(rank), stages, str(first), str(len(bars)), f"{found.busy(rank):.4g}", idle, held))
    show_table(console, columns, rows, left=("stages",), title=title)
    console.print(
        f"{found.duration:.4g} times an average forward in all. Held: microbatches whose forward is done and whose "
        "backward is not, over the chunks of a rank.",
        highlight=False,
    )

# SPDX-License-Identifier: Apache-2.0
"""`bench NAME`: measure, with the arms that are compared in turns, and write a result file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.benches import BENCHES
from ..bench.lengths import ARMS as LENGTH_ARMS
from ..bench.peers import PEERS
from ..bench.start import mode_of
from ..bench.tp_step import ARMS as STEP_ARMS
from ..bench.tp_step import OPERANDS
from ..bench.workloads import DISTRIBUTIONS
from ..testing.results import write_result
from .files import JsonFile, PictureFile, check_apart, refuse, writing
from .measuring import (
    TOKENS,
    Backend,
    Ffn,
    Hidden,
    Ranks,
    Seconds,
    Tokens,
    Watched,
    check_backend,
    checked,
    gemm_names,
    names,
    one_of,
    sizes,
    token_list,
)
from .tables import show_table

bench = typer.Typer(
    help="Measure on CPU ranks (--backend host), ranks that share one GPU, or one rank a GPU (--backend te).\n\n"
    "The mode is in every result; a comparison that it cannot support is left out, with the reason.",
    no_args_is_help=True,
)

Policy = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A table of `tune`: adds the arm `policy`")
]
Force = Annotated[bool, typer.Option("--force", help="Take a --policy of another machine, version or mode")]
StepArms = Annotated[str | None, typer.Option(help=f"Of {', '.join(STEP_ARMS)}; default all that can be compared here")]
LengthArms = Annotated[
    str | None, typer.Option(help=f"Of {', '.join(LENGTH_ARMS)}; default all that can be compared here")
]
Capacity = Annotated[int | None, typer.Option(min=64, help="Registered tokens; default 16384 on GPUs, 512 on the host")]
MOST = 10_000_000  # changes of shape: minutes
StepTokens = Annotated[str | None, typer.Option(help=f"{TOKENS}; default 1/8, 1/4, 1/2, 3/4 and all of the capacity")]
LAYERS = ("te.LayerNormMLP", "te.TransformerLayer")
Layer = Annotated[str, typer.Option(help=f"{' or '.join(LAYERS)} (GPUs)")]


@bench.command(name="set-shape")
def set_shape(
    backend: Backend = "host",
    ranks: Ranks = 2,
    calls: Annotated[int, typer.Option(min=500, max=MOST, help="Changes between two looks at memory")] = 1_000_000,
    timed: Annotated[int, typer.Option(min=100, max=MOST, help="GPUs: changes that are timed one by one")] = 100_000,
    json: JsonFile = None,
) -> None:
    """What one change of the active shape costs, and what a million of them leave in memory."""
    seconds = 60 + calls / 2000
    _measure("set-shape", {"calls": calls, "timed": timed}, backend, ranks, seconds, json)


@bench.command()
def op(
    backend: Backend = "host",
    ranks: Ranks = 2,
    hidden: Hidden = None,
    ffn: Ffn = None,
    tokens: Tokens = None,
    gemms: Annotated[str | None, typer.Option(help="As in fc1_fprop,fc2_fprop; default all eight")] = None,
    peers: Annotated[str | None, typer.Option(help=f"Of {', '.join(PEERS)}; default all")] = None,
    policy: Policy = None,
    force: Force = False,
    seconds: Seconds = 120,
    json: JsonFile = None,
) -> None:
    """Each GEMM with its collective against the GEMM alone and every peer, forward and backward apart.

    Example: python -m ub_dynamic bench op --backend te --ranks 2 --policy table.json --json ops_x2.json
    """
    check_apart(policy=policy, json=json)
    chosen, between = sizes(backend, hidden, ffn)
    options = {
        "hidden": chosen,
        "ffn": between,
        "tokens": token_list(tokens, backend, ranks, chosen),
        "gemms": gemm_names(gemms),
        "peers": names(peers, PEERS, "--peers"),
        "seconds": seconds,
        **_table(policy, force),
    }
    _measure("op", options, backend, ranks, seconds, json)


@bench.command(name="tp-step")
def tp_step(
    backend: Backend = "host",
    ranks: Ranks = 2,
    hidden: Hidden = None,
    ffn: Ffn = None,
    tokens: StepTokens = None,
    capacity: Capacity = None,
    arms: StepArms = None,
    layer: Layer = LAYERS[0],
    operands: Annotated[
        str, typer.Option(help="random, or zeros: a GPU stays below its power limit, and its clocks are steady")
    ] = OPERANDS[0],
    costs: Annotated[bool, typer.Option(help="At the smallest T, what the guard and auto mode cost as well")] = True,
    policy: Policy = None,
    force: Force = False,
    seconds: Seconds = 120,
    json: JsonFile = None,
    plot: PictureFile = None,
) -> None:
    """A training step at T: dynamic, made for exactly T, padded to capacity, rebuilt, without overlap, with a policy.

    Example: python -m ub_dynamic bench tp-step --backend te --hidden 4096 --json tp_step_h4096.json
    """
    check_apart(policy=policy, json=json, plot=plot)
    options = _step_options(backend, hidden, ffn, capacity, layer, policy, force, seconds)
    asked = _fractions(options["capacity"], ranks) if tokens is None else tokens
    found = token_list(asked, backend, ranks, options["hidden"])
    options |= {"tokens": found, "arms": names(arms, STEP_ARMS, "--arms")}
    options |= {"operands": one_of(operands, OPERANDS, "--operands"), "costs": costs}
    if plot is not None and "dynamic" not in options["arms"]:
        given = ",".join(options["arms"])
        refuse("--plot", f"arms = {given}: the picture compares with dynamic; the next valid value is dynamic,{given}")
    _measure("tp-step", options, backend, ranks, seconds, json, plot)


@bench.command()
def lengths(
    backend: Backend = "host",
    ranks: Ranks = 2,
    hidden: Hidden = None,
    ffn: Ffn = None,
    capacity: Capacity = None,
    distributions: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(DISTRIBUTIONS)}; default all, none with --file")
    ] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Document lengths, one a line")] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help="Documents a microbatch; default: packed under the capacity")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="Microbatches of each workload")] = 16,
    seed: Annotated[int, typer.Option(help="Of the drawn lengths")] = 0,
    arms: LengthArms = None,
    layer: Layer = LAYERS[0],
    policy: Policy = None,
    force: Force = False,
    seconds: Seconds = 120,
    json: JsonFile = None,
) -> None:
    """Microbatches of document lengths, one step each without a pause: dynamic against padding to capacity.

    Built-in lengths follow published statistics (ub_dynamic/bench/workloads.py names the sources).
    """
    check_apart(policy=policy, file=file, json=json)
    options = _step_options(backend, hidden, ffn, capacity, layer, policy, force, seconds)
    known = [] if file is not None and distributions is None else names(distributions, DISTRIBUTIONS, "--distributions")
    options |= {
        "distributions": known,
        "file": None if file is None else str(file.absolute()),
        "documents": documents,
        "count": count,
        "seed": seed,
        "arms": names(arms, LENGTH_ARMS, "--arms"),
    }
    _measure("lengths", options, backend, ranks, seconds, json)


@bench.command()
def graphs(
    ranks: Ranks = 2,
    hidden: Annotated[int, typer.Option(min=64, help="H")] = 1024,
    capacity: Annotated[int, typer.Option(min=64, help="Registered tokens")] = 2048,
    replays: Annotated[int, typer.Option(min=1, help="Of each layer")] = 60,
    seed: Annotated[int, typer.Option(help="Of the order of replays")] = 20261130,
    json: JsonFile = None,
) -> None:
    """CUDA graphs, one a T, replayed while another T is active: bits against eager steps. GPUs only."""
    options = {"hidden": hidden, "capacity": capacity, "replays": replays, "seed": seed}
    _measure("graphs", options, "te", ranks, 300, json)


def _step_options(
    backend: str,
    hidden: int | None,
    ffn: int | None,
    capacity: int | None,
    layer: str,
    policy: Path | None,
    force: bool,
    seconds: float,
) -> dict[str, Any]:
    chosen, between = sizes(backend, hidden, ffn)
    one_of(layer, LAYERS, "--layer")
    return {
        "hidden": chosen,
        "ffn": between,
        "capacity": capacity or (16384 if backend == "te" else 512),
        "layer": layer if backend == "te" else "MLP",
        "seconds": seconds,
        **_table(policy, force),
    }


def _fractions(capacity: int, ranks: int) -> str:
    return ",".join(str(max(ranks, capacity * eighths // 8)) for eighths in (1, 2, 4, 6, 8))


def _table(policy: Path | None, force: bool) -> dict[str, Any]:
    return {"policy": None if policy is None else str(policy.absolute()), "force": force}


def _measure(
    name: str,
    options: Mapping[str, Any],
    backend: str,
    ranks: int,
    seconds: float,
    json: Path | None,
    plot: Path | None = None,
) -> None:
    chosen = check_backend(backend)
    if json is not None and json.exists() and _figures(json) is None:
        refuse("--json", f"{json} is there and is no result file, and is left as it is; name another one")
    checked(f"bench {name}", name, options, chosen, ranks)
    watched = Watched(f"bench {name}")
    ended = watched.run(name, options, chosen, ranks, seconds)
    figures = {**BENCHES[name].figures(ended.rows), **_incomplete(ended.status, watched)}
    _show(watched, ended.rows, figures)
    if json is not None:
        target = _partial(json) if ended.status and _is_complete(json) else json
        with writing(f"bench {name}", target):
            write_result(target.stem, figures, ended.rows, mode=mode_of(chosen, ranks), folder=target.parent)
        kept = "" if target == json else f"; {json} keeps its complete result"
        watched.console.print(f"Written to {target}{kept}", highlight=False)
    if plot is not None and ended.rows:
        from ..bench.step_curves import draw

        with writing(f"bench {name}", plot):
            draw(ended.rows, f"Step time against T, {mode_of(chosen, ranks)}", plot)
        watched.console.print(f"Drawn to {plot}", highlight=False)
    if watched.exit_status:
        raise typer.Exit(watched.exit_status)


def _incomplete(status: int, watched: Watched) -> dict[str, float]:
    """Of the figures: that there would be more rows, and whether somebody ended it."""
    if not status:
        return {}
    return {"failed_starts": 1, **({"interrupted": 1} if watched.interrupted else {})}


def _is_complete(path: Path) -> bool:
    """Whether a result file is there that no later, partial one should replace."""
    figures = _figures(path)
    return figures is not None and not figures.get("failed_starts")


def _partial(path: Path) -> Path:
    """Beside ``path``, where there is nothing yet, or an older partial result."""
    names = (path.with_stem(f"{path.stem}_partial{number or ''}") for number in itertools.count())
    return next(each for each in names if not each.exists() or (_figures(each) or {}).get("failed_starts"))


def _figures(path: Path) -> dict[str, float] | None:
    """Those of a result file; None where it is another file, or none."""
    try:
        figures = loads(path.read_text())["figures"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return figures if isinstance(figures, dict) else None


# What a table leaves to the result file.
_LEFT_OUT = ("_low", "_high", "_spread_us", "_spread_ms", "_blocks_ms", "_fraction", "_excess", "_per_s")
_KEPT_TO_FILE = {"kind", "operation", "rounds", "blocks", "epochs"}


def _show(watched: Watched, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, float]) -> None:
    """The rows, without columns that are the same in all of them, and the figures."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    same = {key for key in columns if len(rows) > 1 and len({str(row.get(key)) for row in rows}) == 1}
    shown = [key for key in columns if key not in same | _KEPT_TO_FILE and not key.endswith(_LEFT_OUT)]
    if rows:
        cells = [[_cell(row.get(column)) for column in shown] for row in rows]
        show_table(watched.console, [column.replace("_", " ") for column in shown], cells)
    for key, value in figures.items():
        watched.console.print(f"{key}: {value:.4g}", highlight=False)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "" if value is None else str(value)

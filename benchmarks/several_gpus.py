# SPDX-License-Identifier: Apache-2.0
"""TP overlap with one rank a GPU: bits, tuned tables, every operation and step against every peer, real lengths.

Writes ops_x2.json (_x4, _x8) and a file with that suffix for each part; tables in the folder ``tables`` of ``--out``.
The most important part is first. A part whose file is whole is not run again, so that the same command goes on where
the one before it ended: after its ``--budget``, or on another machine over ``--archive``. NVLink multicast stays off
(UB_SKIPMC=1 and the other variables of :mod:`ub_dynamic.bench.start`).

    python benchmarks/several_gpus.py --gpus 2 --dry-run      only say what would run in which command, with seconds

On a machine that takes commands of 600 s and keeps nothing between two machines, from the root of the checkout, with
Transformer Engine's environment and UB_DYNAMIC_COMMIT; for 4 and 8 GPUs the same with --gpus 4 (x4) and --gpus 8 (x8):

    1.  python benchmarks/several_gpus.py --gpus 2 --out /tmp/x2 --archive $OUT/x2.tar.gz
    2.  cp carried/x2.tar.gz $OUT/; python benchmarks/several_gpus.py --gpus 2 --out /tmp/x2 --archive $OUT/x2.tar.gz
    3.  the same as 2

where ``carried/x2.tar.gz`` is the archive that the command before has brought back, and $OUT the folder whose files
come back. Where the machine is the same as before, /tmp/x2 is there still, and wins. Three commands, 23 minutes, reach
everything; the first two, 18 minutes, all but the steps at H = 8192, real lengths and steps of zeros.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _parts
from _parts import HERE, Part

from ub_dynamic.bench import op
from ub_dynamic.bench.operations import GEMMS
from ub_dynamic.bench.workloads import DISTRIBUTIONS
from ub_dynamic.cli.measuring import token_list
from ub_dynamic.testing.results import results_folder

MODULE = ("-m", "ub_dynamic")
STEADY = "dynamic,exact,pad"  # of a step of zeros: NCCL and a policy compare at full power
PEERS = ("default", "none", "async_tp", "cublasmp")


@dataclass(frozen=True)
class Setup:
    """Where and how large. ``backend``: te, or host for a rehearsal; ``more``: words that a program gets beside."""

    ranks: int
    backend: str
    suffix: str
    out: Path
    hiddens: tuple[int, ...] = (4096, 8192)
    gemms: tuple[str, ...] = tuple(GEMMS)
    tokens: str = "512:16384"
    steps: str = "2048,4096,8192,16384"
    capacity: int = 16384
    tune_s: float = 100.0
    scale: float = 1.0  # of all other seconds
    bits: int = 40  # lengths of each sweep
    operations: int = 1000
    apart: bool = True  # one rank a GPU

    def result(self, name: str) -> Path:
        return self.out / f"{name}_{self.suffix}.json"

    def table(self, hidden: int) -> Path:
        return self.out / "tables" / f"tuned_h{hidden}_{self.suffix}.json"


def plan(setup: Setup) -> list[Part]:
    """Every part, the most important first."""
    first, *others = setup.hiddens
    gpus = setup.backend == "te"
    parts = [_program(setup, "gpus_seen", 2)] if gpus and setup.apart else []
    parts += [_program(setup, "te_bits", 150, "--lengths", str(setup.bits))] if gpus else []
    parts += [_tune(setup, hidden) for hidden in setup.hiddens]
    parts += [_op(setup, hidden, 90) for hidden in setup.hiddens]
    parts.append(_step(setup, "tp_step", first, 100))
    if gpus:
        parts.append(_step(setup, "tp_step_layer", first, 105, "--layer", "te.TransformerLayer"))
        parts.append(_program(setup, "te_stress", 20, "--operations", str(setup.operations)))
    parts += [_step(setup, "tp_step", hidden, 95) for hidden in others]
    parts.append(_lengths(setup, first, 45))
    parts.append(_step(setup, "tp_step_zeros", first, 60, "--operands", "zeros", "--arms", STEADY))
    return parts


def _program(setup: Setup, program: str, seconds: float, *more: str) -> Part:
    name = f"{program}_{setup.suffix}"
    apart = ("--gpus",) if setup.apart else ()
    words = (str(HERE / f"{program}.py"), "--tp", str(setup.ranks), *apart, "--timeout", "{limit}", *more)
    scaled = max(2.0, seconds * setup.scale)
    return Part(name, (*words, "--name", name, "--out", str(setup.out)), scaled, setup.out / f"{name}.json", 1)


def _tune(setup: Setup, hidden: int) -> Part:
    table = setup.table(hidden)
    words = (*MODULE, "tune", *_common(setup, "--tp"), "--hidden", str(hidden), *_cells(setup))
    words = (*words, "--out", str(table), "--plot", str(table.with_suffix(".png")))
    words = (*words, "--seconds", f"{setup.tune_s:g}")
    return Part(f"tune_h{hidden}", words, setup.tune_s, table, _count(setup, hidden), resumes=True)


def _op(setup: Setup, hidden: int, seconds: float) -> Part:
    words = (*_bench(setup, "op", hidden), *_cells(setup))
    return _measured(setup, f"ops_h{hidden}", hidden, words, seconds, _count(setup, hidden))


def _step(setup: Setup, name: str, hidden: int, seconds: float, *more: str) -> Part:
    sizes = ("--capacity", str(setup.capacity), "--tokens", setup.steps, "--no-costs")
    rows = len(token_list(setup.steps, setup.backend, setup.ranks, hidden))
    return _measured(
        setup, f"{name}_h{hidden}", hidden, (*_bench(setup, "tp-step", hidden), *sizes, *more), seconds, rows
    )


def _lengths(setup: Setup, hidden: int, seconds: float) -> Part:
    words = (*_bench(setup, "lengths", hidden), "--capacity", str(setup.capacity))
    return _measured(setup, "lengths", hidden, words, seconds, len(DISTRIBUTIONS))


def _cells(setup: Setup) -> tuple[str, ...]:
    return "--tokens", setup.tokens, "--gemms", ",".join(setup.gemms)


def _count(setup: Setup, hidden: int) -> int:
    """GEMMs at a T."""
    return len(setup.gemms) * len(token_list(setup.tokens, setup.backend, setup.ranks, hidden))


def _bench(setup: Setup, name: str, hidden: int) -> tuple[str, ...]:
    table = ("--policy", str(setup.table(hidden)))
    return (*MODULE, "bench", name, *_common(setup, "--ranks"), "--hidden", str(hidden), *table)


def _common(setup: Setup, ranks: str) -> tuple[str, ...]:
    return "--backend", setup.backend, ranks, str(setup.ranks)


def _measured(setup: Setup, name: str, hidden: int, words: tuple[str, ...], seconds: float, rows: int) -> Part:
    result, scaled = setup.result(name), max(2.0, seconds * setup.scale)
    words = (*words, "--seconds", f"{scaled:g}", "--json", str(result))
    return Part(name, words, scaled, result, rows, setup.table(hidden))


def merge_ops(setup: Setup) -> Path | None:
    """``ops_xN.json``: the rows of every H, and the figures of all of them. ``cells_without_X``: in how many of the
    ``cells_wanted`` the peer X was not measured, or nothing at all."""
    found = [path for hidden in setup.hiddens if (path := setup.result(f"ops_h{hidden}")).exists()]
    if not found:
        return None
    records = [json.loads(path.read_text()) for path in found]
    rows = [row for record in records for row in record["rows"]]
    wanted = sum(_count(setup, hidden) for hidden in setup.hiddens)
    figures = {**op.figures(rows), "cells_wanted": wanted}
    for peer in PEERS:
        measured = sum(f"{peer}_us" in row for row in rows)
        figures |= {f"cells_with_{peer}": measured, f"cells_without_{peer}": wanted - measured}
    widths = [row["over_best_peer_high"] - row["over_best_peer_low"] for row in rows if "over_best_peer_high" in row]
    if widths:
        figures["over_best_peer_interval_max"] = max(widths) / 2
    absent = len(setup.hiddens) - len(found)
    figures["failed_starts"] = absent + sum(record["figures"].get("failed_starts", 0) for record in records)
    target = setup.result("ops")
    merged = {**records[-1], "name": target.stem, "command": _command(setup), "figures": figures, "rows": rows}
    target.write_text(json.dumps(merged, indent=1, allow_nan=False) + "\n")
    return target


def _command(setup: Setup) -> str:
    if setup.apart:
        return f"python benchmarks/several_gpus.py --gpus {setup.ranks}"
    return f"python benchmarks/rehearse.py --on {'gpu' if setup.backend == 'te' else 'cpu'} --ranks {setup.ranks}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parts.options_of(__doc__)
    options: argparse.Namespace = parser.parse_args(arguments)
    out = (options.out or results_folder()).resolve()
    setup = Setup(options.gpus, "te", f"x{options.gpus}", out)

    status = _parts.main(parser, options, plan(setup), out, lambda: merge_ops(setup))
    if not options.dry_run and (merged := merge_ops(setup)) is not None:
        print(f"{merged.name}: {json.loads(merged.read_text())['figures']}", flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())

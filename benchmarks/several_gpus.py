# SPDX-License-Identifier: Apache-2.0
"""TP overlap with one rank a GPU: bits, tuned tables, every operation and step against every peer, real lengths.

    python benchmarks/several_gpus.py --gpus 2                the plan below, 20 minutes at most
    python benchmarks/several_gpus.py --gpus 2 --dry-run      only say what would run, with seconds
    python benchmarks/several_gpus.py --rehearse              the same plan on CPU ranks, tiny, without the bits

The most important part is first, each writes its result file (suffix _x2, _x4, _x8) when it ends, and a part whose
file is there already is not run again: a run that was cut off goes on where it ended. NVLink multicast stays off
(UB_SKIPMC=1 and the other variables of :mod:`ub_dynamic.bench.start`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # a machine that has a copy of the tree, and nothing installed

from ub_dynamic.bench import op  # noqa: E402
from ub_dynamic.testing.launch import RankRun, tail  # noqa: E402
from ub_dynamic.testing.results import results_folder  # noqa: E402

START_S = 20.0  # starting ranks, imports, compiling
GRACE_S = 45.0  # beyond its seconds, before a part is ended
MODULE = ("-m", "ub_dynamic")


@dataclass(frozen=True)
class Part:
    """``seconds``: to measure in. ``writes``: the file that says it is done."""

    name: str
    words: tuple[str, ...]
    seconds: float
    writes: Path


@dataclass(frozen=True)
class Setup:
    """Where and how large. ``backend``: te, or host for a rehearsal."""

    ranks: int
    backend: str
    suffix: str
    out: Path
    tables: Path
    hiddens: tuple[int, ...] = (4096, 8192)
    tokens: str = "512:16384"
    capacity: int = 16384
    scale: float = 1.0  # of all seconds

    def result(self, name: str) -> Path:
        return self.out / f"{name}_{self.suffix}.json"

    def table(self, hidden: int) -> Path:
        return self.tables / f"tuned_h{hidden}_{self.suffix}.json"


def plan(setup: Setup) -> list[Part]:
    """Every part, the most important first."""
    parts = [] if setup.backend == "host" else [_bits(setup, "te_bits", 120), _bits(setup, "te_stress", 30)]
    parts += [_tune(setup, hidden, 140) for hidden in setup.hiddens]
    parts += [_op(setup, hidden, 90) for hidden in setup.hiddens]
    first = setup.hiddens[0]
    parts.append(_step(setup, "tp_step", first, "te.LayerNormMLP", 70))
    if setup.backend == "te":
        parts.append(_step(setup, "tp_step_layer", first, "te.TransformerLayer", 70))
    parts += [_step(setup, "tp_step", hidden, "te.LayerNormMLP", 50) for hidden in setup.hiddens[1:]]
    parts.append(_lengths(setup, first, 45))
    return parts


def _bits(setup: Setup, program: str, seconds: float) -> Part:
    name = f"{program}_{setup.suffix}"
    more = ("--lengths", "20") if program == "te_bits" else ("--operations", "1000")
    shared = () if setup.suffix.startswith("shared") else ("--gpus",)
    words = (str(HERE / f"{program}.py"), "--tp", str(setup.ranks), *shared, "--timeout", str(seconds + GRACE_S))
    return Part(name, (*words, *more, "--name", name, "--out", str(setup.out)), seconds, setup.out / f"{name}.json")


def _tune(setup: Setup, hidden: int, seconds: float) -> Part:
    table = setup.table(hidden)
    picture = ("--plot", str(table.with_suffix(".png")))
    words = (*MODULE, "tune", *_common(setup, "--tp"), "--hidden", str(hidden), "--tokens", setup.tokens)
    return _part(setup, f"tune_h{hidden}", (*words, "--out", str(table), *picture), seconds, table.with_suffix(".png"))


def _op(setup: Setup, hidden: int, seconds: float) -> Part:
    result = setup.result(f"ops_h{hidden}")
    words = (*_bench(setup, "op", hidden), "--tokens", setup.tokens, "--json", str(result))
    return _part(setup, f"op_h{hidden}", words, seconds, result)


def _step(setup: Setup, name: str, hidden: int, layer: str, seconds: float) -> Part:
    result = setup.result(f"{name}_h{hidden}")
    words = (*_bench(setup, "tp-step", hidden), "--capacity", str(setup.capacity), "--layer", layer)
    return _part(setup, f"{name}_h{hidden}", (*words, "--json", str(result)), seconds, result)


def _lengths(setup: Setup, hidden: int, seconds: float) -> Part:
    result = setup.result("lengths")
    words = (*_bench(setup, "lengths", hidden), "--capacity", str(setup.capacity), "--json", str(result))
    return _part(setup, "lengths", words, seconds, result)


def _bench(setup: Setup, name: str, hidden: int) -> tuple[str, ...]:
    table = ("--policy", str(setup.table(hidden)))
    return (*MODULE, "bench", name, *_common(setup, "--ranks"), "--hidden", str(hidden), *table)


def _common(setup: Setup, ranks: str) -> tuple[str, ...]:
    return "--backend", setup.backend, ranks, str(setup.ranks)


def _part(setup: Setup, name: str, words: tuple[str, ...], seconds: float, writes: Path) -> Part:
    scaled = max(2.0, seconds * setup.scale)
    return Part(name, (*words, "--seconds", f"{scaled:g}"), scaled, writes)


def run(parts: Sequence[Part], out: Path, budget_s: float, after: Callable[[], None] = lambda: None) -> list[str]:
    """Run the parts that are not done yet, as far as the time goes; the names of those that failed or were left.

    ``after``: what is done after each.
    """
    end = time.monotonic() + budget_s
    failed = []
    for part in parts:
        if is_done(part.writes):
            print(f"{part.name:24} is there already: {part.writes.name}", flush=True)
            continue
        left = end - time.monotonic()
        if left < START_S + 0.5 * part.seconds:
            print(f"{part.name:24} no time left ({left:.0f} s)", flush=True)
            failed.append(part.name)
            continue
        limit = min(left, START_S + part.seconds + GRACE_S)
        with RankRun([sys.executable, *part.words], _environment(), HERE.parent) as running:
            result = running.wait(limit)
        (out / f"{part.name}.log").write_text(f"{result.stdout}\n{result.stderr}")
        ended = "timed out" if result.timed_out else f"status {result.returncode}"
        print(f"{part.name:24} {ended}, {result.seconds:.0f} s", flush=True)
        if result.returncode or result.timed_out:
            failed.append(part.name)
            print(tail(result.stdout, 10), tail(result.stderr, 30), sep="\n", flush=True)
        after()
    return failed


def is_done(path: Path) -> bool:
    """Whether a part has written its file, and none of its starts failed."""
    if not path.exists():
        return False
    if path.suffix != ".json":
        return True
    return not json.loads(path.read_text()).get("figures", {}).get("failed_starts", 0)


def pack(archive: Path | None, *folders: Path) -> None:
    """One file of everything that is there so far."""
    if archive is None:
        return
    partial = archive.with_name(f"{archive.name}.tmp")
    with tarfile.open(partial, "w:gz") as tar:
        for folder in dict.fromkeys(folders):
            tar.add(folder, arcname=folder.name)
    partial.replace(archive)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    # A program ends its ranks itself, and keeps their rows, before it is ended here.
    return {"PYTHONPATH": path, "COLUMNS": "160", "UB_DYNAMIC_BENCH_START_S": f"{START_S + GRACE_S - 15:g}"}


def merge_ops(setup: Setup) -> Path | None:
    """``ops_xN.json``: the rows of every H, and the figures of all of them."""
    found = [path for hidden in setup.hiddens if (path := setup.result(f"ops_h{hidden}")).exists()]
    if not found:
        return None
    records = [json.loads(path.read_text()) for path in found]
    rows = [row for record in records for row in record["rows"]]
    target = setup.result("ops")
    merged = {**records[-1], "name": target.stem, "command": _command(setup), "figures": op.figures(rows), "rows": rows}
    target.write_text(json.dumps(merged, indent=1, allow_nan=False) + "\n")
    return target


def _command(setup: Setup) -> str:
    if setup.backend == "host":
        return "python benchmarks/several_gpus.py --rehearse"
    return f"python benchmarks/several_gpus.py --gpus {setup.ranks}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, choices=(2, 4, 8), help="ranks, one a GPU: tp")
    parser.add_argument("--shared", action="store_true", help="all ranks on one GPU: a dry run of everything but times")
    parser.add_argument("--rehearse", action="store_true", help="on CPU ranks, tiny")
    parser.add_argument("--out", type=Path, default=None, help="folder of result files and logs")
    parser.add_argument("--tables", type=Path, default=None, help="folder of tuned tables; default: tables in --out")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of both folders, made anew after each part")
    parser.add_argument("--budget", type=float, default=1140, help="seconds for everything")
    parser.add_argument("--only", nargs="+", help="these parts alone")
    parser.add_argument("--skip", nargs="+", default=[], help="without these parts")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, with seconds, and run nothing")
    options = parser.parse_args(arguments)
    setup = _setup(options)
    parts = [part for part in plan(setup) if part.name not in options.skip]
    if unknown := set(options.only or ()) - {part.name for part in parts}:
        parser.error(f"no part {sorted(unknown)}; parts are {', '.join(part.name for part in parts)}")
    parts = [part for part in parts if not options.only or part.name in options.only]
    if options.dry_run:
        for part in parts:
            print(f"{part.name:24} {START_S + part.seconds:5.0f} s  python {' '.join(part.words)}")
        print(f"{'in all':24} {sum(START_S + part.seconds for part in parts):5.0f} s of {options.budget:.0f} s")
        return 0
    for folder in (setup.out, setup.tables):
        folder.mkdir(parents=True, exist_ok=True)
    if options.shared:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    failed = run(parts, setup.out, options.budget, lambda: pack(options.archive, setup.out, setup.tables))
    if (merged := merge_ops(setup)) is not None:
        print(f"{merged.name}: {json.loads(merged.read_text())['figures']}")
    pack(options.archive, setup.out, setup.tables)
    return int(bool(failed))


def _setup(options: argparse.Namespace) -> Setup:
    out = (options.out or results_folder()).resolve()
    tables = (options.tables or out / "tables").resolve()
    if options.rehearse:
        sizes = {"hiddens": (64,), "tokens": "64:128", "capacity": 128, "scale": 0.05}
        return Setup(options.gpus, "host", f"rehearsal{options.gpus}", out, tables, **sizes)
    return Setup(options.gpus, "te", f"{'shared' if options.shared else 'x'}{options.gpus}", out, tables)


if __name__ == "__main__":
    raise SystemExit(main())

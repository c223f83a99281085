# SPDX-License-Identifier: Apache-2.0
"""megatron-core's GPTModel on packed text: dynamic T against padding and against no TP overlap.

    python benchmarks/megatron_gpu.py             writes megatron_tp2.json
    python benchmarks/megatron_gpu.py --pp 2      writes megatron_tp2pp2.json

All modes take the same microbatches in turns, through Megatron's own schedules and distributed optimizer. Losses and
gradient norms are compared step by step with the run without TP overlap, once for each kind of recomputation, on a
small model: NCCL goes through sockets here. Dynamic and padded steps are timed on a larger one, with documents of the
CPU example's length: attention costs what the documents cost, padded or not, so with long ones time does not follow T.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import _one_gpu
import torch

import ub_dynamic as ub
from ub_dynamic import api

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
TP = 2
MODES = ("dynamic", "pad", "none")


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    sys.path.insert(0, EXAMPLES)
    from gpt.model import initialize_parallel

    from ub_dynamic.integrations import megatron

    megatron.install()
    initialize_parallel(settings_of(options, "no"))
    for number, recompute in enumerate(options.recompute):
        _one_part(world, settings_of(options, recompute), MODES, {"part": "equal", "recompute": recompute}, add)
        if number == 0:  # the times come early, in case that the run is cut off
            timed = timed_settings_of(options)
            # As TE runs by default: cuDNN's deterministic backward of long sequences takes 128 bytes a score.
            with mock.patch.dict(os.environ, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}):
                _one_part(world, timed, ("dynamic", "pad"), {"part": "time", "recompute": "no"}, add)
    megatron.uninstall()


def _one_part(
    world: Any, settings: argparse.Namespace, modes: Sequence[Any], facts: Mapping[str, Any], add: Callable[[Any], None]
) -> None:
    """All steps of all modes in turns; ``facts`` stand in every row, with the overlaps that this rank really ran in the
    steps of the row's mode."""
    from gpt.model import initialize_userbuffers
    from gpt.train import Run, take_turns
    from gpt.work import prepare

    from ub_dynamic.testing.te_world import ub_cfgs_with_room

    begin = time.monotonic()
    work = prepare(settings)
    initialize_userbuffers(work.capacity, settings, ub_cfgs_with_room(world))
    runs = [Run(mode, settings, work) for mode in modes]
    for run in runs:
        run.warm_up(len(work.steps) if facts["part"] == "time" else 1)
    ran, before = Counter[str](), _overlaps()

    def count(run: Run) -> None:
        nonlocal before
        ran[run.mode] += (now := _overlaps()) - before
        before = now

    take_turns(runs, work, count, warm=0)
    facts = {**facts, "hidden": settings.hidden, "token_ratio": work.token_ratio, "capacity": work.capacity}
    for run in runs:
        for row in run.rows():
            add({**facts, "overlaps": ran[run.mode], **row})
        run.close()
    del runs, run
    gc.collect()
    ub.destroy_ub()
    torch.cuda.empty_cache()
    if world.rank == 0:
        print(f"{facts}: {time.monotonic() - begin:.1f} s", flush=True)


def _overlaps() -> int:
    """How many GEMMs of this rank have been overlapped so far."""
    rows = api.manager().backend.doctor_report()["communicators"]
    return sum(sum(row["overlaps"].values()) for row in rows)


def settings_of(options: argparse.Namespace, recompute: str, prefix: str = "") -> argparse.Namespace:
    """The example's settings, checked by its own rules. ``prefix``: of the options that stand in for others."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from gpt.settings import parse

    flags = ["--mode", *MODES, "--tp", str(TP), "--recompute", recompute]
    names = ("pp", "steps", "microbatches", "documents", "max_document", "hidden", "layers", "heads", "lr", "seed")
    for name in names:
        value = getattr(options, prefix + name, getattr(options, name))
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return parse(flags)


def timed_settings_of(options: argparse.Namespace) -> argparse.Namespace:
    """Those of the part that is timed: a model that is large enough to keep the GPU busy."""
    return settings_of(options, "no", "timed_")


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest difference over all kinds of recomputation, the time of the part that is timed, and the fewest
    overlaps that a mode with overlap ran in a part."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from gpt.report import compare

    made: dict[str, float] = {}
    for part, recompute in dict.fromkeys((row["part"], row["recompute"]) for row in rows):
        chosen = [row for row in rows if (row["part"], row["recompute"]) == (part, recompute)]
        steps = {mode: [SimpleNamespace(**row) for row in chosen if row["mode"] == mode] for mode in MODES}
        runs = [SimpleNamespace(mode=mode, steps=found) for mode, found in steps.items() if found]
        if len({len(run.steps) for run in runs}) > 1:
            continue  # a start that was ended in the middle of a row
        found = compare(runs)
        least = min(row["overlaps"] for row in chosen if row["mode"] != "none")
        made["overlaps_least"] = min(made.get("overlaps_least", least), least)
        if part == "time":
            made |= {name: found[name] for name in ("dynamic_over_pad_time", "token_ratio") if name in found}
            continue
        for name, value in found.items():
            if name.startswith("max_"):
                made[name] = max(made.get(name, value), value)
        made["iterations"] = min(made.get("iterations", found["iterations"]), found["iterations"])
    if "dynamic_over_pad_time" in made:
        made["dynamic_over_pad_excess"] = made["dynamic_over_pad_time"] - made["token_ratio"]
    return made


def name_of(options: argparse.Namespace) -> str:
    """The name of the result file."""
    return f"megatron_tp{TP}" + (f"pp{options.pp}" if options.pp > 1 else "")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _one_gpu.parser(__doc__, tp=(TP,), timeout=300)
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--recompute", nargs="+", default=["no", "selective", "full"], help="one after another")
    parser.add_argument("--steps", type=int, default=50, help="iterations of each run")
    parser.add_argument("--microbatches", type=int, default=2, help="of each step")
    parser.add_argument("--documents", type=int, default=4, help="of a microbatch")
    parser.add_argument("--max-document", type=int, default=512, help="bytes")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    timed = parser.add_argument_group("the part that is timed, dynamic against pad")
    timed.add_argument("--timed-steps", type=int, default=5)
    timed.add_argument("--timed-microbatches", type=int, default=4)
    timed.add_argument("--timed-documents", type=int, default=32)
    timed.add_argument("--timed-max-document", type=int, default=2048, help="bytes, as in the CPU example")
    timed.add_argument("--timed-hidden", type=int, default=4096)
    timed.add_argument("--timed-heads", type=int, default=32)
    timed.add_argument("--timed-lr", type=float, default=1e-4)
    options = parser.parse_args(arguments)
    options.tp = [TP * options.pp]  # ranks of the one start; --tp of the other programs means that
    settings_of(options, options.recompute[0])  # refuses what cannot be before anything is started
    timed_settings_of(options)
    return options


if __name__ == "__main__":
    chosen = parse()
    raise SystemExit(_one_gpu.main(name_of(chosen), chosen, measure, figures))

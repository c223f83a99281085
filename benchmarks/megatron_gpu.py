# SPDX-License-Identifier: Apache-2.0
"""megatron-core's GPTModel on packed text: dynamic T against padding and against no TP overlap.

    python benchmarks/megatron_gpu.py             writes megatron_tp2.json
    python benchmarks/megatron_gpu.py --pp 2      writes megatron_tp2pp2.json

All modes take the same microbatches in turns, through Megatron's own schedules and distributed optimizer. Losses and
gradient norms are compared step by step with the run without TP overlap, once for each kind of recomputation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _one_gpu

import ub_dynamic as ub

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
TP = 2
MODES = ("dynamic", "pad", "none")


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    sys.path.insert(0, EXAMPLES)
    from gpt.model import initialize_parallel, initialize_userbuffers
    from gpt.train import Run, take_turns
    from gpt.work import prepare

    from ub_dynamic.integrations import megatron
    from ub_dynamic.testing.te_world import ub_cfgs_with_room

    settings = settings_of(options, "no")
    megatron.install()
    initialize_parallel(settings)
    work = prepare(settings)
    initialize_userbuffers(work.capacity, settings, ub_cfgs_with_room(world))
    for recompute in options.recompute:
        settings = settings_of(options, recompute)
        runs = [Run(mode, settings, work) for mode in MODES]
        take_turns(runs, work, lambda run: None)
        for run in runs:
            for row in run.rows():
                add({"recompute": recompute, "token_ratio": work.token_ratio, "capacity": work.capacity, **row})
            run.close()
        del runs, run
    ub.destroy_ub()
    megatron.uninstall()


def settings_of(options: argparse.Namespace, recompute: str) -> argparse.Namespace:
    """The example's settings, checked by its own rules."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from gpt.settings import parse

    flags = ["--mode", *MODES, "--tp", str(TP), "--recompute", recompute]
    names = ("pp", "steps", "microbatches", "documents", "max_document", "hidden", "layers", "heads", "seed")
    for name in names:
        flags += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return parse(flags)


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest difference over all kinds of recomputation; the time of the run that has none, or of the first."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from gpt.report import compare

    made: dict[str, float] = {}
    for recompute in dict.fromkeys(row["recompute"] for row in rows):
        chosen = [row for row in rows if row["recompute"] == recompute]
        steps = {mode: [SimpleNamespace(**row) for row in chosen if row["mode"] == mode] for mode in MODES}
        runs = [SimpleNamespace(mode=mode, steps=found) for mode, found in steps.items() if found]
        if len({len(run.steps) for run in runs}) > 1:
            continue  # a start that was ended in the middle of a row
        for name, value in compare(runs, chosen[0]["token_ratio"]).items():
            made[name] = max(made.get(name, value), value) if name.startswith("max_") else made.get(name, value)
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
    parser.add_argument("--microbatches", type=int, default=4, help="of each step")
    parser.add_argument("--documents", type=int, default=4, help="of a microbatch")
    parser.add_argument("--max-document", type=int, default=2048, help="bytes")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.tp = [TP * options.pp]  # ranks of the one start; --tp of the other programs means that
    settings_of(options, options.recompute[0])  # refuses what cannot be before anything is started
    return options


if __name__ == "__main__":
    chosen = parse()
    raise SystemExit(_one_gpu.main(name_of(chosen), chosen, measure, figures))

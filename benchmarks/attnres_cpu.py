# SPDX-License-Identifier: Apache-2.0
"""Attention residuals over a pipeline, float64 on the CPU: gradients against the unsplit model, blocks on the wire.
Writes attnres_cpu.json.

python benchmarks/attnres_cpu.py
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import _host_ranks
import _pipeline
import torch

from ub_dynamic.groups import Group
from ub_dynamic.ranks import discover
from ub_dynamic.testing.pipeline_cases import P4V2, P4V4, Case, cases, run_case
from ub_dynamic.testing.results import write_result

SIZES = (1, 2, 4)


def random_cases(pp: int, vpp: int, count: int) -> list[Case]:
    """Uneven cuts, blocks of any length, 8 microbatches of 8 different T."""
    draw = random.Random(1000 * pp + vpp)
    found = []
    for _ in range(count):
        sublayers = (*(draw.randint(0, 3) for _ in range(pp * vpp - 1)), draw.randint(1, 3))
        tokens = draw.sample(range(1, 40), 8)
        lengths = tuple((a := draw.randint(1, t), *([t - a] if t > a else [])) for t in tokens)
        found.append(Case(pp, sublayers, draw.randint(1, 6), lengths))
    return found


def measure(group: Group, count: int) -> list[dict[str, Any]]:
    """Every case with as many ranks as there are, plain and cached."""
    rows = []
    for vpp in SIZES:
        every = cases(group.size, vpp) + random_cases(group.size, vpp, count)
        for cache in (False, True):
            outcomes = [run_case(case, case.config(), cache=cache, timeout_s=60) for case in every]
            wrong = 0
            for case, outcome in zip(every, outcomes, strict=True):
                wrong += set(outcome.wire.blocks.values()) - {case.routes(cache).closed_form()} != set()
            rows.append(
                {
                    "pp": group.size,
                    "vpp": vpp,
                    "cache": cache,
                    "cases": len(every),
                    "max_abs_grad_error": max(outcome.grad_error for outcome in outcomes),
                    "max_abs_loss_error": max(outcome.loss_error for outcome in outcomes),
                    "off_the_closed_form": wrong,
                }
            )
    return rows


def volumes(group: Group) -> dict[str, int]:
    """Blocks sent per microbatch in the two placements that the literature counts, forward as backward."""
    found = {}
    for name, case in (("p4v4", P4V4), ("p4v2", P4V2)):
        for cache, word in ((False, "plain"), (True, "cached")):
            counts = set(run_case(case, case.config(), cache=cache, timeout_s=60).wire.blocks.values())
            found[f"blocks_sent_{name}_{word}"] = counts.pop() if len(counts) == 1 else -1
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cases", type=int, default=4, help="random cuts for each number of ranks and chunks")
    chosen = options.parse_args()
    if _host_ranks.is_rank():
        torch.set_num_threads(1)
        size = discover().world_size
        _host_ranks.answer(
            size, lambda group: {"rows": measure(group, chosen.cases), "volumes": volumes(group) if size == 4 else {}}
        )
        return 0
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    for pp in SIZES:
        answer = _pipeline.ask(__file__, pp, ["--cases", str(chosen.cases)], timeout=900)
        rows += answer["rows"]
        figures |= answer["volumes"]
        for row in answer["rows"]:
            print(*(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
    figures = {
        "cases": sum(row["cases"] for row in rows),
        "max_abs_grad_error_plain": max(row["max_abs_grad_error"] for row in rows if not row["cache"]),
        "max_abs_grad_error_cached": max(row["max_abs_grad_error"] for row in rows if row["cache"]),
        **figures,
    }
    write_result("attnres_cpu", figures, rows, mode="cpu-mpi")
    wrong = figures["max_abs_grad_error_plain"] > 0 or figures["max_abs_grad_error_cached"] > 1e-12
    return int(wrong or any(row["off_the_closed_form"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Choosing the overlap by T: what a switch costs, and whether results stay those of each configuration. Writes
policy.json.

    python benchmarks/te_policy.py --tp 2 4

The cost is the time of a change of T under a policy that switches at each, less that without a policy, the largest of
all ranks. Of each the fastest round counts: a processor whose other thread is busy runs at half its speed, for seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import _one_gpu

import ub_dynamic as ubd
from ub_dynamic.testing import te_policy
from ub_dynamic.testing.te_memory import alternate, growth, initialise, time_calls
from ub_dynamic.testing.te_world import keep_to_own_processors, ub_cfgs_with_room

_ROUNDS = (False, True, True, False) * 4  # without a policy, with, with, without


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    begin = time.perf_counter()
    outcome = te_policy.run(world, options.microbatches, options.seed)
    add({"kind": "bits", "seed": options.seed, **asdict(outcome), "seconds": time.perf_counter() - begin})
    if world.rank == 0:
        print(outcome, flush=True)
    keep_to_own_processors(world)
    found = te_policy.stages(world, options.seed)
    policy, lengths = te_policy.policy_of_stages(found), tuple(found)
    taken: dict[bool, list[float]] = {False: [], True: []}
    left: dict[str, int] = {}
    for chooses in _ROUNDS:
        manager = initialise(
            world,
            [te_policy.CAPACITY, te_policy.HIDDEN],
            ub_cfgs=ub_cfgs_with_room(world),
            policy=policy if chooses else None,
        )
        alternate(world, lengths, te_policy.HIDDEN, 2000)
        world.barrier()
        taken[chooses].append(statistics.median(time_calls(world, lengths, te_policy.HIDDEN, options.timed)))
        if chooses and not left:
            left = growth(world, lengths, te_policy.HIDDEN, options.switches)
        communicators = len(manager.backend.specs) + len(manager.backend.skipped)
        del manager
        world.barrier()
        ubd.destroy_ub()
        if chooses:
            more = communicators
    without, chosen = (min(taken[chooses]) for chooses in (False, True))
    row = {
        "set_shape_median_us": without,
        "set_shape_with_policy_median_us": chosen,
        "switch_cost_us": chosen - without,
        "calls": options.switches,
        "switching_growth_bytes": sum(left.values()),
        "communicators": more,
    }
    rows, rounds = world.gather(row), world.gather(taken)
    add(
        {
            "kind": "cost",
            **{key: max(each[key] for each in rows) for key in row},
            "rounds_us": [of_rank[False] for of_rank in rounds],
            "rounds_with_policy_us": [of_rank[True] for of_rank in rounds],
        }
    )


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    bits = [row for row in rows if row["kind"] == "bits"]
    cost = [row for row in rows if row["kind"] == "cost"]
    made: dict[str, float] = {}
    if bits:
        made["microbatches"] = min(row["microbatches"] for row in bits)
        made["switches"] = min(row["switches"] for row in bits)
        made["configurations"] = min(row["configurations"] for row in bits)
        made["mismatches"] = sum(row["mismatches"] for row in bits)
    if cost:
        made["switch_cost_us"] = max(row["switch_cost_us"] for row in cost)
    grown = [row["memory_growth_bytes"] for row in bits] + [row["switching_growth_bytes"] for row in cost]
    if grown:
        made["memory_growth_bytes"] = max(0, *grown)
    return made


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=240)
    options.add_argument("--microbatches", type=int, default=1000, help="each at another T than the one before")
    options.add_argument("--timed", type=int, default=20_000, help="changes of each round that are timed one by one")
    options.add_argument("--switches", type=int, default=200_000, help="changes between two looks at memory")
    options.add_argument("--seed", type=int, default=20261130)
    raise SystemExit(_one_gpu.main("policy", options.parse_args(), measure, figures))

# SPDX-License-Identifier: Apache-2.0
"""``bench lengths``: microbatches of real lengths, one step each without a pause, dynamic and padded in turns.

T changes with every microbatch, as in training on packed documents. ``time_over_token_ratio``: the time of dynamic
over that of padding, over the same ratio of tokens; 1 means that time follows the tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .interleave import is_over, ratio, rounds_of, slowest
from .operations import any_method_multiple
from .report import Budget, Report
from .tp_step import Factory, factory_of, supported
from .workloads import DISTRIBUTIONS, microbatches
from .worlds import World

ARMS = ("dynamic", "pad", "none", "policy")


def measure(world: World, options: Mapping[str, Any], report: Report) -> None:
    """Options: those of ``tp-step``, ``distributions`` (names) or ``file``, ``documents`` a microbatch or None,
    ``count`` microbatches at most, ``seed``.
    """
    from .op import load_policy

    policy = load_policy(world, options)
    arms = supported(world, options["arms"], policy, report)
    steps_of = factory_of(world, {**options, "arms": arms}, policy)
    workloads = workloads_of(options, world.size)
    budget = Budget(options["seconds"], dict.fromkeys(workloads, 1.0))
    for number, (name, tokens) in enumerate(workloads.items()):
        report.progress(number, len(workloads), name)
        row = one_workload(world, steps_of, options["capacity"], tokens, arms, budget.until(name))
        report.row({"kind": "lengths", "tp": world.size, "workload": name, **row})
    report.progress(len(workloads), len(workloads), "done")


def workloads_of(options: Mapping[str, Any], tp: int) -> dict[str, list[int]]:
    """T of the microbatches of each workload, valid for every method."""
    capacity, multiple = options["capacity"], any_method_multiple(options["hidden"], tp)
    lengths = {
        name: DISTRIBUTIONS[name].draw(64 * options["count"], options["seed"]) for name in options["distributions"]
    }
    if options.get("file"):
        from ..advise.reading import read_lengths

        file = Path(options["file"])
        lengths[file.name] = [length for block in read_lengths(file) for length in block.tolist()]
    return {
        name: microbatches(found, capacity, tp, multiple=multiple, documents=options.get("documents"))[
            : options["count"]
        ]
        for name, found in lengths.items()
    }


def one_workload(
    world: World, steps_of: Factory, capacity: int, tokens: Sequence[int], arms: Sequence[str], until: float
) -> dict[str, Any]:
    """A row: epochs over all microbatches in each arm, interleaved, at least two rounds, after one that is not counted:
    what is compiled for a new T is compiled there."""
    steps = steps_of(None)
    for arm in arms:
        steps.epoch(arm, tokens)
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    duration, orders = 0.0, rounds_of(len(arms))
    number = 0
    while number < len(orders) or not is_over(world.gather, time.monotonic() + duration >= until):
        begin = time.monotonic()
        for index in orders[number % len(orders)]:
            taken[arms[index]].append(steps.epoch(arms[index], tokens))
        number, duration = number + 1, time.monotonic() - begin
    steps.close()
    worst = {arm: slowest(world.gather, times) for arm, times in taken.items()}
    row: dict[str, Any] = {
        "microbatches": len(tokens),
        "epochs": number,
        "tokens_median": statistics.median(tokens),
        "tokens_max": max(tokens),
        "token_ratio": sum(tokens) / (len(tokens) * capacity),
    }
    row |= {f"{arm}_ms": statistics.median(times) for arm, times in worst.items()}
    row |= {f"{arm}_tokens_per_s": 1000 * sum(tokens) / row[f"{arm}_ms"] for arm in worst}
    if "pad" in worst:
        row |= ratio(worst["dynamic"], worst["pad"]).fields("time_ratio")
        row["time_over_token_ratio"] = row["time_ratio"] / row["token_ratio"]
    for arm in ("none", "dynamic"):
        if "policy" in worst and arm in worst:
            row |= ratio(worst["policy"], worst[arm]).fields(f"policy_over_{arm}")
    return row


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest of every ratio over the workloads."""
    keys = ("time_over_token_ratio", "policy_over_none", "policy_over_dynamic")
    return {f"{key}_max": max(found) for key in keys if (found := [row[key] for row in rows if key in row])}

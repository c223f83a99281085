# SPDX-License-Identifier: Apache-2.0
"""Hierarchical attention of this package against TE's own, with TE's kernels in both. Writes cp_hierarchical.json.

    python benchmarks/cp_hierarchical_gpu.py --tp 4 2

``--tp`` ranks share one GPU and are the context-parallel group: a2a+p2p as 2 x 2 with 4 ranks, p2p and a2a with 2.
Compared are out and gradients: real tokens with TE's and with dense attention in float32, padding with 0. And the
time that kernels, copies and fills take on the device in a forward and backward, NCCL's left out (it goes through
sockets here): summed over ranks, the median of rounds in which the two take turns.

``max_rel_error`` and ``outside_tolerance`` are against TE where all of TE's own is within the tolerance of its tests of
dense attention, and else against dense attention (``stock_undefined`` comparisons): TE leaves dk and dv undefined for
sequences so short that the last chunk is all padding (TE issue #2186), which "uneven" has. ``ours_outside_dense`` and
``stock_outside_dense`` count elements outside of that tolerance in every comparison, ``max_rel_error_dense`` is ours.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("NVTE_TORCH_COMPILE", "1")  # as TE runs by default
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import _one_gpu
import torch
from _cp import TOLERANCE, Problem, groups_of, median, outside_tolerance, relative_error, te_module, watch

from ub_dynamic.cp.hierarchical import HierarchicalTHDAttention

HEADS, GROUPS = 16, 8
LENGTHS = {
    "four": (2048, 4096, 1024, 1024),
    "long": (16384, 8192, 8192),
    "padded": (2041, 4090, 1000, 1019),
    "uneven": (12001, 1, 0, 5, 300, 77, 4001, 2, 1000),
}
ROUNDS = 3

Arm = Callable[[Problem], list[torch.Tensor]]


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    problems = {
        kind: Problem.make(lengths, world.size, world.rank, world.device, HEADS, GROUPS)
        for kind, lengths in LENGTHS.items()
        if world.size == 4 or kind in ("four", "padded")
    }
    for comm_type in ("a2a+p2p",) if world.size == 4 else ("p2p", "a2a"):
        stock, arms = make_arms(comm_type, world.device)
        for kind, problem in problems.items():
            for row in compare(world, problem, stock, arms):
                add({"comm_type": comm_type, "lengths": kind, **row})


def make_arms(comm_type: str, device: torch.device) -> tuple[Arm, dict[str, Arm]]:
    """TE's attention, and ours by kernel."""
    groups = groups_of(comm_type, 2)
    inner, outer = {"a2a+p2p": groups, "p2p": (None, groups), "a2a": (groups, None)}[comm_type]
    module = te_module(HEADS, GROUPS, groups, comm_type, deterministic=False)

    def stock(problem: Problem) -> list[torch.Tensor]:
        kwargs = problem.batch.dpa_kwargs(device)
        return problem.step(lambda q, k, v: module(q, k, v, **kwargs))

    def ours(kernel: str, wire: torch.dtype | None = None) -> Arm:
        own = HierarchicalTHDAttention(inner, outer, kernel=kernel, wire_dtype=wire)
        return lambda problem: problem.step(lambda q, k, v: own(q, k, v, problem.batch))

    return stock, {"te": ours("te"), "te, bfloat16 wire": ours("te", torch.bfloat16), "torch": ours("torch")}


def compare(world: Any, problem: Problem, stock: Arm, arms: Mapping[str, Arm]) -> list[dict[str, Any]]:
    """A row for each of our arms: errors against TE's, and device time in turns with it."""
    theirs = stock(problem)
    stock_outside = max(world.gather(problem.outside(theirs)))
    wanted = problem.tokens(problem.dense if stock_outside else theirs)
    dense = problem.tokens(problem.dense)
    rows: list[dict[str, Any]] = []
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("stock", *arms)}
    for turn in range(ROUNDS):
        for name, arm in {"stock": stock, **arms}.items():
            seen = watch(lambda arm=arm: arm(problem), repeats=3)
            every = world.gather((seen.seconds, seen.attention_seconds))
            times[name].append((sum(one for one, _ in every), sum(one for _, one in every)))
            if turn or name == "stock":
                continue
            made = arm(problem)
            got = problem.tokens(made)
            found = {
                "max_rel_error": relative_error(got, wanted),
                "outside": outside_tolerance(got, wanted, TOLERANCE),
                "max_rel_error_dense": relative_error(got, dense),
                "ours_outside_dense": problem.outside(made),
                "not_finite": sum(not torch.isfinite(x).all() for x in made),
                "padding": sum(bool(x.index_select(0, problem.padding).any()) for x in made),
                "launches": seen.launches,
                "host_waits": seen.host_waits + seen.copies_to_host,
            }
            every_found = world.gather(tuple(found.values()))
            worst = {name: max(values) for name, values in zip(found, zip(*every_found, strict=True), strict=True)}
            rows.append({"kernel": name, "stock_outside_dense": stock_outside, **worst})
    for row in rows:
        ours = times[row["kernel"]], times["stock"]
        row["seconds"], row["te_seconds"] = (median([one for one, _ in pairs]) for pairs in ours)
        row["attention_seconds"], row["te_attention_seconds"] = (median([one for _, one in pairs]) for pairs in ours)
        row["over_te"] = row["seconds"] / row["te_seconds"]
    return rows


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    mine = [row for row in rows if row["kernel"] == "te"]
    hierarchical = [row for row in mine if row["comm_type"] == "a2a+p2p"]
    made = {
        "max_rel_error": max(row["max_rel_error"] for row in rows),
        "outside_tolerance": sum(row["outside"] for row in rows),
        "max_rel_error_dense": max(row["max_rel_error_dense"] for row in rows),
        "ours_outside_dense": sum(row["ours_outside_dense"] for row in rows),
        "stock_outside_dense": sum(row["stock_outside_dense"] for row in mine),
        "stock_undefined": sum(row["stock_outside_dense"] > 0 for row in rows),
        "not_finite": sum(row["not_finite"] for row in rows),
        "padding_not_zero": sum(row["padding"] for row in rows),
        "host_waits": sum(row["host_waits"] for row in rows),
        "comparisons": len(rows),
    }
    if hierarchical:
        made["kernel_time_over_te"] = max(row["over_te"] for row in hierarchical)
        made["kernel_time_over_te_median"] = median([row["over_te"] for row in hierarchical])
    for name in ("p2p", "a2a"):
        found = [row["over_te"] for row in mine if row["comm_type"] == name]
        if found:
            made[f"kernel_time_over_te_{name}"] = max(found)
    return made


def main() -> int:
    made = _one_gpu.parser(__doc__, tp=(4, 2), timeout=180)
    return _one_gpu.main("cp_hierarchical", made.parse_args(), measure, figures)


if __name__ == "__main__":
    sys.exit(main())

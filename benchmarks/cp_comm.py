# SPDX-License-Identifier: Apache-2.0
"""Every way to compute packed context-parallel attention in turns, and the one the chooser takes. Writes cp_comm.json.

    python benchmarks/cp_comm.py --tp 4

``--tp`` ranks are the context-parallel group, one a GPU; of a shared GPU no times are kept. ``links`` are measured
first (an all-to-all between all ranks, attention on one), then :func:`ub_dynamic.cp.choose.choose_cp_comm` foretells
the order, then all ways that it allows take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")  # as TE runs by default
os.environ.setdefault("NVTE_TORCH_COMPILE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # a ring's streams run side by side; 1 is for TP overlap

import _one_gpu
import torch
import torch.distributed as dist
from _cp import HEAD_SIZE, Problem, groups_of, outside_tolerance, relative_error, te_module

from ub_dynamic.bench.interleave import Gather, interleaved, ratio
from ub_dynamic.cp.choose import Candidate, CPProblem, choose_cp_comm
from ub_dynamic.cp.cost import Attention, Links
from ub_dynamic.cp.hierarchical import HierarchicalTHDAttention
from ub_dynamic.packing import PackedBatch

HEADS, GROUPS = 16, 8
LENGTHS = {
    "four": (2048, 4096, 1024, 1024),
    "short": (512,) * 32,
    "long": (16384, 8192, 8192),
    "one": (32768,),
    "padded": (2041, 4090, 1000, 1019),
}
TOLERANCE = 3.5e-2  # of TE's own tests, for grouped-query attention in bfloat16
_BYTES = 64 << 20

Way = Callable[[], list[torch.Tensor]]
Timed = Callable[[Callable[[Any], Any], int], float]


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    timing = _one_gpu.timing_world(world)
    timed = timing.timed
    links = measure_links(world, timed)
    rates = {"fast": links.fast, "flops": links.flops, "latency": links.latency}
    add({"what": "links", **_one_gpu.times(timing, rates), **_one_gpu.connections()})
    known: dict[tuple[str, int], Any] = {}
    end = time.monotonic() + options.seconds
    for index, kind in enumerate(options.lengths):
        lengths = [length // options.shrink for length in LENGTHS[kind]]
        problem = Problem.make(lengths, world.size, world.rank, world.device, HEADS, GROUPS)
        plan = choose_cp_comm(CPProblem(problem.batch, HEADS, GROUPS, HEAD_SIZE), links=links)
        ways = {str(one): way(one, problem, known) for one, _ in plan.ranking}
        errors = against_the_first(problem, ways, world.gather)
        until = time.monotonic() + (end - time.monotonic()) / (len(options.lengths) - index)
        taken = interleaved(tuple(ways), lambda name, steps: timed(lambda _: ways[name](), steps), world.gather, until)  # noqa: B023
        times = {name: statistics.median(each) for name, each in taken.items()}
        for candidate, cost in plan.ranking:
            name = str(candidate)
            row = {
                "what": "way", "lengths": kind, "way": name, "implementation": candidate.implementation,
                "comm_type": candidate.comm_type, "inner": candidate.inner, **errors[name],
            }  # fmt: skip
            measured = {
                "ms": times[name], "predicted_ms": 1e3 * (cost.seconds or 0.0), "chosen": candidate == plan.candidate,
                "over_best": times[name] / min(times.values()),
            }  # fmt: skip
            theirs = str(Candidate("te", candidate.comm_type, candidate.inner, candidate.outer))
            if candidate.implementation == "ub_dynamic" and theirs in taken:
                measured |= ratio(taken[name], taken[theirs]).fields("over_te")
            row |= _one_gpu.times(timing, measured)
            add(row)
            if world.rank == 0:
                print(row, flush=True)


def measure_links(world: Any, timed: Timed) -> Links:
    """Bytes/s that a rank sends to all others, the time of an empty message, attention's operations/s on one rank."""
    size = _BYTES // 2 // world.size * world.size
    sent, received = (torch.zeros(size, dtype=torch.bfloat16, device=world.device) for _ in range(2))
    small = torch.zeros(world.size, dtype=torch.bfloat16, device=world.device)
    seconds = _seconds(world, timed, lambda: dist.all_to_all_single(received, sent))
    latency = _seconds(world, timed, lambda: dist.all_to_all_single(torch.empty_like(small), small))
    fast = 2 * size * (world.size - 1) / world.size / max(seconds - latency, 1e-9)
    return Links(fast=fast, slow=fast, flops=_attention_flops(world, timed), domain=world.size, latency=latency)


def _attention_flops(world: Any, timed: Timed) -> float:
    import transformer_engine.pytorch as te

    lengths = (4096,) * 4
    problem = Problem.make(lengths, 1, 0, world.device, HEADS, GROUPS)
    module = te.DotProductAttention(
        HEADS, HEAD_SIZE, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="thd",
        attn_mask_type="padding_causal",
    )  # fmt: skip
    kwargs = problem.batch.dpa_kwargs(world.device)
    with torch.no_grad():
        seconds = _seconds(world, timed, lambda: module(problem.q, problem.k, problem.v, **kwargs))
    return Attention(HEADS, GROUPS, HEAD_SIZE, 2, True).work(PackedBatch.from_lengths(lengths)) / seconds


def _seconds(world: Any, timed: Timed, step: Callable[[], object], repeats: int = 20) -> float:
    """Of one call, the slowest rank's."""
    world.barrier()
    return max(world.gather(timed(lambda _: step(), repeats))) / 1e3


def way(candidate: Candidate, problem: Problem, known: dict[tuple[str, int], Any]) -> Way:
    """A forward and backward by ``candidate``. ``known``: the groups by communication type. Collective."""
    key = candidate.comm_type, candidate.inner
    if key not in known:
        known[key] = groups_of(candidate.comm_type, candidate.inner)
    groups = known[key]
    if candidate.implementation == "te":
        module = te_module(HEADS, GROUPS, groups, candidate.comm_type, deterministic=False)
        kwargs = problem.batch.dpa_kwargs(problem.q.device)
        return lambda: problem.step(lambda q, k, v: module(q, k, v, **kwargs))
    inner, outer = {"a2a+p2p": groups, "p2p": (None, groups), "a2a": (groups, None)}[candidate.comm_type]
    own = HierarchicalTHDAttention(inner, outer, kernel="te")
    return lambda: problem.step(lambda q, k, v: own(q, k, v, problem.batch))


def against_the_first(problem: Problem, ways: Mapping[str, Way], gather: Gather) -> dict[str, dict[str, float]]:
    """Errors of each way's out and gradients against the first one's, the largest of any rank and the sum of all.

    Of real tokens alone, and of those only what every way defines: what padding gets is each way's own affair.
    """
    wanted: list[torch.Tensor] | None = None
    found = {}
    for name, one in ways.items():
        got = problem.tokens(one(), ring=problem.batch.cp)
        wanted = got if wanted is None else wanted
        told = gather((relative_error(got, wanted), outside_tolerance(got, wanted, TOLERANCE)))
        found[name] = {"rel_error": max(error for error, _ in told), "outside": float(sum(count for _, count in told))}
    return found


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    ways = [row for row in rows if row["what"] == "way"]
    made = {
        "comparisons": float(len(ways)),
        "rel_error_max": max((row["rel_error"] for row in ways), default=0.0),
        "outside_tolerance": sum(row["outside"] for row in ways),
    }
    if picks := [row["over_best"] for row in ways if row.get("chosen")]:
        made["chosen_over_best_max"] = max(picks)
    for name in ("a2a+p2p", "p2p", "a2a"):
        if found := [row["over_te"] for row in ways if row["comm_type"] == name and "over_te" in row]:
            made[f"{name.replace('+', '_')}_over_te_max"] = max(found)
    return made


def main() -> int:
    made = _one_gpu.timed_parser("cp_comm", __doc__, seconds=120, timeout=300)
    made.add_argument("--lengths", nargs="+", choices=tuple(LENGTHS), default=list(LENGTHS), help="of the packed batch")
    made.add_argument("--shrink", type=int, default=1, help="divide every length by this, to try the program")
    options = made.parse_args()
    return _one_gpu.main(options.name, options, measure, figures)


if __name__ == "__main__":
    sys.exit(main())

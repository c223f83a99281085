# SPDX-License-Identifier: Apache-2.0
"""TE's context-parallel attention with and without this package's padding flag and patches. Writes cp_te.json.

    python benchmarks/cp_te.py --tp 2 4

``--tp`` ranks share one GPU and are the context-parallel group. Stock is the installed TE, told the right
``pad_between_seqs``; ours gets boundary tensors that are equal but distinct, and no flag. Both run in the same
processes. Compared are out and gradients (small lengths, as cuDNN's deterministic backward needs much memory), and of a
forward and backward (lengths 2048, 4096, 1024, 1024, TE's default algorithms) the kernel launches, copies to the host
and waits of the host. NCCL goes through sockets here, so times would mean nothing.

Two things are asked of results. Every bit is that of stock, in rows that stock defines: not out's rows of padding, and
not dk and dv of a sequence so short that its last chunk is all padding (TE issue #2186; the sequence of one token). And
elements of real tokens, all of them, are within the tolerance of TE's own tests of dense attention in float32.
``mismatches`` counts tensors that differ from stock, or, where stock does not repeat itself or is outside of that
tolerance in rows that it defines, none; and elements of ours that are outside, ``ours_outside_dense``, always.
``stock_outside_dense`` counts those of stock, ``stock_undefined`` comparisons in which it has any. The patches are of
TE's ring: with all_gather what TE leaves undefined stays so, and counts as ``inherited_outside_dense`` only.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# As TE runs by default; te_world would switch it off. Must be set before TE is imported.
os.environ.setdefault("NVTE_TORCH_COMPILE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import _one_gpu
import torch
from _cp import Problem, Seen, differing, groups_of, no_host_sync, ring_of, te_module, watch

from ub_dynamic.cp.current import packed
from ub_dynamic.cp.pad_hooks import install_pad_resolver
from ub_dynamic.cp.te_patches import te_backward_patches

HEADS, GROUPS = 8, 4
COUNTED = {"full": (2048, 4096, 1024, 1024), "padded": (2041, 4090, 1000, 1019)}
SMALL = {"full": (512, 1024, 256, 256), "padded": (509, 1000, 1, 255)}
STEPS = 200

Add = Callable[[Mapping[str, Any]], None]


class Attention:
    """One ``te.DotProductAttention``, called as stock and as ours."""

    def __init__(self, comm_type: str, cp_group: Any, deterministic: bool) -> None:
        self.module = te_module(HEADS, GROUPS, cp_group, comm_type, deterministic)

    def stock(self, problem: Problem) -> list[torch.Tensor]:
        kwargs = problem.batch.dpa_kwargs(problem.q.device)
        return problem.step(lambda q, k, v: self.module(q, k, v, **kwargs))

    def auto(self, problem: Problem, flag: bool | None = None) -> list[torch.Tensor]:
        """As most loaders call it: real and padded boundaries in tensors of their own, no flag."""
        kwargs = {**problem.batch.dpa_kwargs(problem.q.device), "pad_between_seqs": flag}
        kwargs["cu_seqlens_q_padded"] = kwargs["cu_seqlens_kv_padded"] = self._own_padded(problem)
        return problem.step(lambda q, k, v: self.module(q, k, v, **kwargs))

    def ours(self, problem: Problem) -> list[torch.Tensor]:
        """The same call, with the resolver and the patches in place."""
        with packed(problem.batch):
            return self.auto(problem)

    def _own_padded(self, problem: Problem) -> torch.Tensor:
        known = self.__dict__.setdefault("_padded", {})
        if problem.batch not in known:
            known[problem.batch] = problem.batch.device_metadata(problem.q.device).cu_seqlens_padded.clone()
        return known[problem.batch]


def measure(world: Any, options: argparse.Namespace, add: Add) -> None:
    add({"what": "versions", "cudnn": _cudnn_version()})
    names = ["p2p", "a2a", "all_gather"] + (["a2a+p2p"] if world.size == 4 else [])
    groups = {name: groups_of(name, 2) for name in names}
    with_small = {
        kind: Problem.make(lengths, world.size, world.rank, world.device, HEADS, GROUPS)
        for kind, lengths in SMALL.items()
    }
    with_counted = {
        kind: Problem.make(lengths, world.size, world.rank, world.device, HEADS, GROUPS)
        for kind, lengths in COUNTED.items()
    }
    for name in names:  # the ring first, and all of it, for a run that ends early
        bits(world, name, Attention(name, groups[name], deterministic=True), with_small, add)
        for kind, problem in with_counted.items():
            counts(world, name, kind, Attention(name, groups[name], deterministic=False), problem, add)
    alternating(world, Attention("p2p", groups["p2p"], deterministic=True), with_small, add)
    if not options.no_graphs:
        graphs(world, Attention("p2p", groups["p2p"], deterministic=True), with_small, add)


def bits(world: Any, name: str, attention: Attention, problems: Mapping[str, Problem], add: Add) -> None:
    """Tensors that differ from stock in what stock defines, and elements of both that are not dense attention."""
    ring, patched = ring_of(name, world.size), name != "all_gather"
    for kind, problem in problems.items():
        stock, again = (attention.stock(problem) for _ in range(2))
        with install_pad_resolver(attention.module) as hook, te_backward_patches() as patches:
            attention.ours(problem)
            synced, ours = _without_sync(lambda problem=problem: attention.ours(problem))
            flag = _flag(hook)
        defined, repeated, mine = (problem.defined(one, ring) for one in (stock, again, ours))
        found = {
            "not_repeated": differing(defined, repeated),
            "differing": differing(mine, defined),
            "stock_wrong": max(problem.outside(one, ring) for one in (stock, again)),
            "ours_outside_dense": problem.outside(ours, 1 if patched else ring),
            "all_outside_dense": problem.outside(ours),
            "stock_outside_dense": max(problem.outside(one) for one in (stock, again)),
            "flag_wrong": flag != problem.batch.has_padding,
            "syncs": synced,
        }
        row = {"what": "bits", "comm_type": name, "lengths": kind, **_worst_of(world, found)}
        add({**row, "unpatched": len(patches.refused)})


def alternating(world: Any, attention: Attention, problems: Mapping[str, Problem], add: Add) -> None:
    """Steps with and without padding in turns against each alone, where TE defines it; the last ones against dense
    attention."""

    def defined(kind: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return problems[kind].defined(tensors, world.size)

    stock = {kind: defined(kind, attention.stock(problem)) for kind, problem in problems.items()}
    last: dict[str, list[torch.Tensor]] = {}
    wrong = 0
    with install_pad_resolver(attention.module), te_backward_patches():
        for step in range(STEPS):
            kind = ("full", "padded")[step % 2]
            last[kind] = attention.ours(problems[kind])
            wrong += differing(defined(kind, last[kind]), stock[kind])
    found = {
        "differing": wrong,
        "ours_outside_dense": sum(problems[kind].outside(tensors) for kind, tensors in last.items()),
    }
    add({"what": "alternating", "steps": STEPS, **_worst_of(world, found)})


def counts(world: Any, name: str, kind: str, attention: Attention, problem: Problem, add: Add) -> None:
    """Launches, copies to the host and waits of one step, the most of any rank."""
    arms: dict[str, Seen] = {
        "stock": watch(lambda: attention.stock(problem)),
        "stock auto flag": watch(lambda: attention.auto(problem)),
    }
    with install_pad_resolver(attention.module), te_backward_patches():
        arms["ours"] = watch(lambda: attention.ours(problem))
    for arm, seen in arms.items():
        every = world.gather((seen.launches, seen.copies_to_host, seen.host_waits, seen.launch_calls))
        row = {
            "what": "launches",
            "comm_type": name,
            "lengths": kind,
            "arm": arm,
            "launches": max(launches for launches, *_ in every),
            "launches_by_rank": [launches for launches, *_ in every],
            "launch_calls": max(calls for *_, calls in every),
            "copies_to_host": max(copies for _, copies, *_ in every),
            "host_waits": max(waits for _, _, waits, _ in every),
        }
        if name == "p2p":
            row["kernels"] = dict(sorted(seen.names.items(), key=lambda one: -one[1]))
        add(row)


def graphs(world: Any, attention: Attention, problems: Mapping[str, Problem], add: Add) -> None:
    """Forward and backward captured in one CUDA graph and replayed on other numbers, against eager stock where TE
    defines it, and against dense attention."""
    for kind, problem in problems.items():
        with install_pad_resolver(attention.module), te_backward_patches():
            graph, captured = capture(world, lambda problem=problem: attention.ours(problem))
        before = [x.detach().clone() for x in (problem.q, problem.k, problem.v)]
        with torch.no_grad():
            for x in (problem.q, problem.k, problem.v):
                x.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [x.clone() for x in captured]
        eager = attention.stock(problem)
        with torch.no_grad():
            for x, old in zip((problem.q, problem.k, problem.v), before, strict=True):
                x.copy_(old)
        q, k, v, dout = problem.whole
        dense = problem.dense_of(q * 0.5, k * 0.5, v * 0.5, dout)
        found = {
            "differing": differing(problem.defined(replayed, world.size), problem.defined(eager, world.size)),
            "ours_outside_dense": problem.outside(replayed, dense=dense),
        }
        add({"what": "graph", "lengths": kind, **_worst_of(world, found)})


def capture(world: Any, step: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A CUDA graph of ``step``, which has run once before under TE's flag: TE chooses and plans by it."""
    from transformer_engine.pytorch.graph import set_capture_end, set_capture_start

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    set_capture_start()  # as make_graphed_callables does before it warms up
    try:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        world.barrier()
        # NCCL's own thread may ask for events meanwhile.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            captured = step()
    finally:
        set_capture_end()
    world.barrier()
    return graph, captured


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    def of(what: str, **wanted: Any) -> list[Mapping[str, Any]]:
        return [
            row for row in rows if row["what"] == what and all(row.get(name) == value for name, value in wanted.items())
        ]

    made: dict[str, float] = {}
    for row in of("launches", comm_type="p2p"):
        prefix = {"stock": "stock_launches", "stock auto flag": "stock_auto_launches", "ours": "launches"}[row["arm"]]
        suffix = "" if row["lengths"] == "full" else "_padded"
        made[f"{prefix}{suffix}_cp{row['tp']}"] = row["launches"]
    ours = of("launches", arm="ours")
    if ours:
        made["device_syncs"] = sum(row["copies_to_host"] + row["host_waits"] for row in ours)
        made["device_syncs"] += sum(row["syncs"] for row in of("bits"))
    compared = of("bits")
    # Where stock repeats itself and is right, every bit must be the same; else dense attention alone decides.
    made["mismatches"] = sum(row["differing"] for row in compared if not row["not_repeated"] and not row["stock_wrong"])
    made["mismatches"] += sum(row["differing"] for row in of("alternating"))
    made["ours_outside_dense"] = sum(row["ours_outside_dense"] for row in (*compared, *of("alternating")))
    made["mismatches"] += made["ours_outside_dense"]
    made["inherited_outside_dense"] = sum(row["all_outside_dense"] - row["ours_outside_dense"] for row in compared)
    made["stock_outside_dense"] = sum(row["stock_outside_dense"] for row in compared)
    made["stock_undefined"] = sum(row["stock_outside_dense"] > 0 for row in compared)
    made["wrong_flags"] = sum(row["flag_wrong"] for row in compared)
    made["comparisons"] = len(compared)
    made["not_repeatable"] = sum(row["not_repeated"] > 0 for row in compared)
    captured = of("graph")
    made["graph_captures"] = len(captured)
    made["graph_mismatches"] = sum(row["differing"] + row["ours_outside_dense"] for row in captured)
    return made


def _without_sync(step: Callable[[], list[torch.Tensor]]) -> tuple[int, list[torch.Tensor]]:
    """Whether torch had to wait for the device, and the step's tensors."""
    try:
        with no_host_sync():
            return 0, step()
    except RuntimeError as error:
        print(f"a step waited for the device: {error}", flush=True)
        return 1, step()


def _cudnn_version() -> str:
    """As TE finds it; torch refuses to answer where it was built with another one."""
    from transformer_engine.pytorch.utils import get_cudnn_version

    return ".".join(map(str, get_cudnn_version()))


def _flag(hook: Any) -> bool:
    """The flag that the resolver gave last."""
    verdicts = [verdict for verdict, _ in hook.resolver._remembered.values()]
    return bool(verdicts and verdicts[-1].pad_between_seqs)


def _worst_of(world: Any, found: Mapping[str, int]) -> dict[str, int]:
    """The largest of all ranks, by name. Collective."""
    every = world.gather(tuple(int(value) for value in found.values()))
    return {name: max(values) for name, values in zip(found, zip(*every, strict=True), strict=True)}


def main() -> int:
    made = _one_gpu.parser(__doc__, timeout=150)
    made.add_argument("--no-graphs", action="store_true", help="leave out CUDA graph capture")
    return _one_gpu.main("cp_te", made.parse_args(), measure, figures)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Step time of TE's packed context-parallel attention, with and without our flag and patches. Writes cp_step.json.

    python benchmarks/cp_step.py --tp 2

The experiment of TE issue #3487: BF16, packed sequences, p2p, real and padded boundaries that are equal and lie in
tensors of their own. ``--tp`` ranks are the context-parallel group, one a GPU; of a shared GPU no times are kept.
Four arms take turns in one process: stock, the resolver alone, the patches alone, both. Once attention alone, once
inside a stack of attention layers with their projections.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")  # as TE runs by default
os.environ.setdefault("NVTE_TORCH_COMPILE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # a ring's streams run side by side; 1 is for TP overlap

import _one_gpu
import torch
from _cp import HEAD_SIZE, Problem, groups_of, te_module, watch

from ub_dynamic.bench.interleave import interleaved, ratio
from ub_dynamic.bench.worlds import TEWorld
from ub_dynamic.cp.current import packed
from ub_dynamic.cp.pad_hooks import install_pad_resolver
from ub_dynamic.cp.te_patches import te_backward_patches

HEADS, GROUPS, LAYERS = 16, 16, 4
LENGTHS = {"four": (2048, 4096, 1024, 1024), "long": (16384, 8192, 8192), "many": (256,) * 32}
ARMS = ("stock", "resolver", "patches", "both")

Step = Callable[[], object]
Add = Callable[[Mapping[str, Any]], None]


class Alone:
    """``te.DotProductAttention``, called as most loaders call it: no flag, boundaries in tensors of their own."""

    def __init__(self, problem: Problem, groups: Any) -> None:
        self.module = te_module(HEADS, GROUPS, groups, "p2p", deterministic=False)
        self._problem, self._kwargs = problem, boundaries(problem)

    def __call__(self) -> object:
        return self._problem.step(lambda q, k, v: self.module(q, k, v, **self._kwargs))


class Stack:
    """Layers of norm, projections and attention, one after another."""

    def __init__(self, problem: Problem, groups: Any) -> None:
        import transformer_engine.pytorch as te

        hidden, device = HEADS * HEAD_SIZE, problem.q.device
        self.module = torch.nn.ModuleList(
            te.MultiheadAttention(
                hidden,
                HEADS,
                num_gqa_groups=GROUPS,
                attention_dropout=0.0,
                input_layernorm=True,
                fuse_qkv_params=True,
                qkv_format="thd",
                attn_mask_type="padding_causal",
                params_dtype=torch.bfloat16,
                device=device,
            )
            for _ in range(LAYERS)
        )
        stream, ranks = torch.cuda.Stream(), list(range(torch.distributed.get_world_size()))
        for layer in self.module:
            layer.set_context_parallel_group(groups, ranks, stream, "p2p")
        self._x = torch.randn(len(problem.q), hidden, device=device, dtype=torch.bfloat16).requires_grad_()
        self._grad = torch.randn_like(self._x)
        # MultiheadAttention has the format from its constructor
        self._kwargs = {name: value for name, value in boundaries(problem).items() if name != "qkv_format"}

    def __call__(self) -> object:
        self._x.grad = None
        x = self._x
        for layer in self.module:
            x = layer(x, **self._kwargs)
        x.backward(self._grad.view_as(x))
        for parameter in self.module.parameters():
            parameter.grad = None
        return x


def boundaries(problem: Problem) -> dict[str, Any]:
    """The keywords of a call: real and padded boundaries equal, in tensors of their own, no flag."""
    kwargs = {**problem.batch.dpa_kwargs(problem.q.device), "pad_between_seqs": None}
    padded = problem.batch.device_metadata(problem.q.device).cu_seqlens_padded.clone()
    kwargs["cu_seqlens_q_padded"] = kwargs["cu_seqlens_kv_padded"] = padded
    return kwargs


@contextlib.contextmanager
def arm_of(name: str, step: Alone | Stack, problem: Problem) -> Iterator[None]:
    """The resolver, the patches, both or none, in place."""
    with contextlib.ExitStack() as stack:
        if name in ("resolver", "both"):
            for module in step.module.modules():
                if type(module).__name__ == "DotProductAttention":
                    stack.enter_context(install_pad_resolver(module))
            stack.enter_context(packed(problem.batch))
        if name in ("patches", "both"):
            stack.enter_context(te_backward_patches())
        yield


def measure(world: Any, options: argparse.Namespace, add: Add) -> None:
    groups, timing = groups_of("p2p", 1), _one_gpu.timing_world(world)
    parts = [(kind, make) for kind in options.lengths for make in (Alone, Stack)]
    end = time.monotonic() + options.seconds
    for index, (kind, make) in enumerate(parts):
        lengths = [length // options.shrink for length in LENGTHS[kind]]
        problem = Problem.make(lengths, world.size, world.rank, world.device, HEADS, GROUPS)
        step = make(problem, groups)
        until = time.monotonic() + (end - time.monotonic()) / (len(parts) - index)
        row = {"lengths": kind, "where": make.__name__.lower(), **compare(timing, step, problem, until)}
        add({**row, **_one_gpu.connections()})
        if world.rank == 0:
            print(row, flush=True)


def compare(world: TEWorld, step: Alone | Stack, problem: Problem, until: float) -> dict[str, Any]:
    """One row: milliseconds, ratios to stock, launches and waits of the host of every arm."""

    def block(arm: str, steps: int) -> float:
        with arm_of(arm, step, problem):
            return world.timed(lambda _: step(), steps)

    row: dict[str, Any] = {}
    for arm in ARMS:
        with arm_of(arm, step, problem):
            seen = watch(step)
        told = world.gather((seen.launches, seen.host_waits + seen.copies_to_host))
        row[f"{arm}_launches"], row[f"{arm}_host_waits"] = (max(values) for values in zip(*told, strict=True))
    taken = interleaved(ARMS, block, world.gather, until)
    times: dict[str, Any] = {"blocks": len(taken["stock"])}
    for arm in ARMS:
        times[f"{arm}_ms"] = statistics.median(taken[arm])
        if arm != "stock":
            times |= ratio(taken[arm], taken["stock"]).fields(f"{arm}_over_stock")
    return row | _one_gpu.times(world, times)


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    made: dict[str, float] = {"comparisons": len(rows)}
    for arm in ARMS[1:]:
        if found := [row[f"{arm}_over_stock"] for row in rows if f"{arm}_over_stock" in row]:
            made[f"{arm}_over_stock_max"], made[f"{arm}_over_stock_median"] = max(found), statistics.median(found)
    made["both_host_waits"] = max(row["both_host_waits"] for row in rows)
    return made


def main() -> int:
    made = _one_gpu.timed_parser("cp_step", __doc__, seconds=90, timeout=240)
    made.add_argument("--lengths", nargs="+", choices=tuple(LENGTHS), default=list(LENGTHS), help="of the packed batch")
    made.add_argument("--shrink", type=int, default=1, help="divide every length by this, to try the program")
    options = made.parse_args()
    return _one_gpu.main(options.name, options, measure, figures)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Time of a training step at T: dynamic, made for exactly T, padded to capacity. Writes te_step.json.

    python benchmarks/te_step.py --tp 2 4

One step is forward and backward of ``te.LayerNormMLP(H, 4H)`` in BF16 with TE's default overlaps. All arms
live in one process and take turns in blocks, A B C C B A, so that a drifting clock is fair to all: TE's table
of communicators is pointed at one set or the other between blocks. ``exact`` and ``pad`` are stock TE,
without the guard's wrappers; ``active`` enters ``active_shape`` anew in each step, two shape changes.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _one_gpu
import torch

import ub_dynamic as ubd
from ub_dynamic.planning import plan_fixed_count
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, build, random_tensor
from ub_dynamic.testing.te_memory import initialise
from ub_dynamic.testing.te_world import World, quantization_modes

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.125)
BLOCK_S = 0.06  # a block has so many steps that it takes about this long
KIND = KINDS["te.LayerNormMLP"]


class Sets:
    """The dynamic communicators and TE's own of one exact shape, in one process; TE's table names one of
    them.

    Both register on the one native communicator of the process, which has room for 31 regions: two sets of
    twelve.
    """

    def __init__(self, world: World, capacity: int, hidden: int, exact: int | None) -> None:
        import transformer_engine.pytorch.module.base as base

        self._base, self._world = base, world
        self.capacity, self.hidden = capacity, hidden
        self.manager = initialise(world, [capacity, hidden])
        self._dynamic = base._ub_communicators
        self._exact: dict[Any, Any] = {}
        if exact is not None:
            base._ub_communicators = None
            base.initialize_ub(
                [exact, hidden],
                world.size,
                quantization_modes=quantization_modes(["none"]),
                dtype=torch.bfloat16,
                bootstrap_backend="gloo",
            )
            self._exact = base._ub_communicators
            base._ub_communicators = self._dynamic

    def use(self, arm: str) -> None:
        """Point TE at the communicators of an arm, and put the guard's wrappers where the arm has them."""
        self.manager.backend.connect(None)
        self.manager.reset_active_shape()
        self.manager.auto = arm == "auto"
        self._base._ub_communicators = self._exact if arm == "exact" else self._dynamic
        if arm in ("active", "auto"):
            self.manager.backend.connect(self.manager._on_operand)

    def close(self) -> None:
        self.use("unguarded")
        self._world.barrier()
        self._exact.clear()
        self._exact = self._dynamic = {}
        ubd.destroy_ub()


class Steps:
    """The layer, its operands, and one step in each arm."""

    def __init__(self, world: World, sets: Sets, layer: torch.nn.Module, operands: torch.Tensor) -> None:
        self.world, self.sets, self.layer, self.operands = world, sets, layer, operands

    def run(self, arm: str, tokens: int, steps: int) -> float:
        """Milliseconds a step, over ``steps`` steps at T = ``tokens``; ``pad`` runs at capacity whatever T
        is.
        """
        rows = (self.sets.capacity if arm == "pad" else tokens) // self.world.size
        self.sets.use(arm)
        leaf = self.operands[0, :rows].detach().requires_grad_()
        grad = self.operands[1, :rows]
        one = {"active": self.set, "unguarded": self.set, "auto": self.auto}.get(arm, self.plain)
        self.world.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            one(leaf, grad, tokens)
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begin) / steps

    def set(self, leaf: torch.Tensor, grad: torch.Tensor, tokens: int) -> None:
        with self.sets.manager.active_shape([tokens, self.sets.hidden]):
            self.plain(leaf, grad, tokens)

    def auto(self, leaf: torch.Tensor, grad: torch.Tensor, tokens: int) -> None:
        self.plain(leaf, grad, tokens)
        self.sets.manager.reset_active_shape()  # as many changes as active_shape makes

    def plain(self, leaf: torch.Tensor, grad: torch.Tensor, _tokens: int) -> None:
        self.layer(leaf).backward(grad)
        leaf.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None


def interleaved(
    steps: Steps, arms: Sequence[str], tokens: int, rounds: int, agree: Callable[[float], float]
) -> dict[str, list[float]]:
    """Milliseconds of every block of every arm, the slowest rank's, in palindromic rounds."""
    counts = {}
    for arm in arms:
        steps.run(arm, tokens, 3)
        counts[arm] = max(3, round(BLOCK_S * 1000 / agree(steps.run(arm, tokens, 3))))
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(rounds):
        order = list(arms) if number % 2 == 0 else list(reversed(arms))
        for arm in (*order, *reversed(order)):
            taken[arm].append(steps.run(arm, tokens, counts[arm]))
    ranks = steps.world.gather(taken)
    return {arm: [max(blocks) for blocks in zip(*(rank[arm] for rank in ranks), strict=True)] for arm in arms}


def measure(world: World, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    capacity, hidden = options.capacity, options.hidden
    operands = random_tensor((2, capacity // world.size, hidden), world, 1)
    agree = lambda value: max(world.gather(value))  # noqa: E731
    layer = None
    for fraction in FRACTIONS:
        tokens = int(capacity * fraction)
        sets = Sets(world, capacity, hidden, tokens)
        layer = build(KIND, OVERLAPS["default"], hidden, world) if layer is None else layer
        steps = Steps(world, sets, layer, operands)
        # the costs of guard and auto are asked for where a step is shortest
        more = ("unguarded", "auto") if fraction == min(FRACTIONS) else ()
        rounds = options.rounds * (2 if more else 1)
        taken = interleaved(steps, ("exact", "active", "pad", *more), tokens, rounds, agree)
        row: dict[str, Any] = {"tokens": tokens, "capacity_fraction": fraction, "blocks": len(taken["exact"])}
        for arm, blocks in taken.items():
            row[f"{arm}_ms"] = statistics.median(blocks)
            row[f"{arm}_spread"] = (max(blocks) - min(blocks)) / statistics.median(blocks)
        row["active_over_exact"] = row["active_ms"] / row["exact_ms"]
        row["active_over_exact_paired"] = statistics.median(map(operator.truediv, taken["active"], taken["exact"]))
        row["active_over_pad"] = row["active_ms"] / row["pad_ms"]
        row["active_over_pad_excess"] = row["active_over_pad"] - fraction
        if more:
            row["guard_cost_fraction"] = row["active_ms"] / row["unguarded_ms"] - 1
            row["auto_cost_fraction"] = row["auto_ms"] / row["unguarded_ms"] - 1
        add({"kind": "step", **row})
        if world.rank == 0:
            print({key: round(value, 4) for key, value in row.items()}, flush=True)
        sets.close()
    assert layer is not None
    add({"kind": "lengths", **_lengths(world, layer, operands, options)})


def _lengths(
    world: World, layer: torch.nn.Module, operands: torch.Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """Real microbatches, four source files of the standard library each, dynamic and padded to capacity in
    turns.
    """
    capacity = options.capacity
    tokens = real_lengths(options.microbatches, world.size, capacity)
    sets = Sets(world, capacity, options.hidden, None)
    steps = Steps(world, sets, layer, operands)
    for each in (capacity, min(tokens)):
        steps.run("active", each, 3)
        steps.run("pad", each, 3)
    totals: dict[str, list[float]] = {"active": [], "pad": []}
    for number in range(options.rounds):
        arms = ("active", "pad") if number % 2 == 0 else ("pad", "active")
        for arm in arms:
            totals[arm].append(_epoch(steps, arm, tokens))
    slowest = {arm: [max(each) for each in zip(*world.gather(taken), strict=True)] for arm, taken in totals.items()}
    sets.close()
    active, pad = (statistics.median(slowest[arm]) for arm in ("active", "pad"))
    ratio = sum(tokens) / (len(tokens) * capacity)
    return {
        "microbatches": len(tokens),
        "token_ratio": ratio,
        "active_ms": active,
        "pad_ms": pad,
        "time_ratio": active / pad,
        "time_over_token_ratio": active / pad / ratio,
    }


def _epoch(steps: Steps, arm: str, tokens: Sequence[int]) -> float:
    """Milliseconds of one pass over all microbatches, one step each, without a pause between them."""
    steps.run(arm, tokens[0], 1)
    rows = [(steps.sets.capacity if arm == "pad" else each) // steps.world.size for each in tokens]
    leaves = [steps.operands[0, :count].detach().requires_grad_() for count in rows]
    one = steps.set if arm == "active" else steps.plain
    steps.world.barrier()
    begin = time.perf_counter()
    for each, count, leaf in zip(tokens, rows, leaves, strict=True):
        one(leaf, steps.operands[1, :count], each)
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin)


def real_lengths(count: int, tp: int, capacity: int) -> list[int]:
    """T of ``count`` microbatches of the CPU example (``examples/train_packed.py``), scaled so that the
    largest is the capacity.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from packed.data import draw, read_documents

    documents = draw(read_documents(2048), 4 * count, seed=0)
    plan = plan_fixed_count([len(document) for document in documents], 4, tp=tp)
    scale = capacity / plan.max_tokens
    return [min(capacity, -(-int(tokens * scale) // tp) * tp) for tokens in plan.tokens]


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    steps = [row for row in rows if row["kind"] == "step"]
    lengths = [row for row in rows if row["kind"] == "lengths"]
    made = {
        "active_over_exact_max": max(row["active_over_exact"] for row in steps),
        "active_over_exact_paired_max": max(row["active_over_exact_paired"] for row in steps),
        "active_over_pad_excess_max": max(row["active_over_pad_excess"] for row in steps),
    }
    for key in ("guard_cost_fraction", "auto_cost_fraction"):
        found = [row[key] for row in steps if key in row]
        if found:
            made[key] = max(found)
    if lengths:
        made["lengths_time_over_token_ratio"] = max(row["time_over_token_ratio"] for row in lengths)
    return made


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=200)
    options.add_argument("--hidden", type=int, default=4096)
    options.add_argument("--capacity", type=int, default=16384)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--microbatches", type=int, default=24)
    raise SystemExit(_one_gpu.main("te_step", options.parse_args(), measure, figures))

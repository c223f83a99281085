# SPDX-License-Identifier: Apache-2.0
"""Time of a training step at T: dynamic, made for exactly T, padded to capacity. Writes te_step.json.

    python benchmarks/te_step.py --tp 2 4 --seconds 85

One step is forward and backward of ``te.LayerNormMLP(H, 4H)`` in BF16 with TE's default overlaps. All arms live in one
process and take turns in short blocks: TE's table of communicators is pointed at one set or the other between them.
``exact`` and ``pad`` are stock TE, without the guard's wrappers; ``active`` enters ``active_shape`` anew in each step,
two shape changes; ``unguarded`` is the same without the guard, ``auto`` the same with no call at all.

What makes the comparison fair: a block starts with a drained device and two steps that are not timed; every arm
follows every other equally often (an arm that follows ``pad`` would meet a hotter, slower GPU, so ``pad`` is measured
apart, against ``active``); half of the blocks run with the dynamic buffers first in memory, half with the exact ones;
Python's garbage collector is off in blocks, and every rank keeps to processors of its own. A ratio is the median of
those between blocks of the same round, ``*_interval`` the half width of its 95 % interval; the figures are the largest
of these medians.
"""

from __future__ import annotations

import time

_START = time.monotonic()  # importing torch counts, too

import argparse  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator, Mapping, Sequence  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

os.environ.setdefault("NVTE_TORCH_COMPILE", "1")  # TE's own default, which te_world would switch off
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import _one_gpu  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import ub_dynamic as ubd  # noqa: E402
from ub_dynamic.planning import plan_fixed_count  # noqa: E402
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, build, random_tensor  # noqa: E402
from ub_dynamic.testing.te_memory import initialise  # noqa: E402
from ub_dynamic.testing.te_world import World, keep_to_own_processors, quantization_modes  # noqa: E402

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.125)
SMALLEST = min(FRACTIONS)  # where the costs of guard and auto are asked for, since a step is shortest there
SHARES = {1.0: 0.14, 0.75: 0.14, 0.5: 0.14, 0.25: 0.16, SMALLEST: 0.32}  # of the time; the rest is for lengths
BLOCK_S = 0.04
WARM = 2  # steps of a block that are not timed
KIND = KINDS["te.LayerNormMLP"]

Add = Callable[[Mapping[str, Any]], None]


class Sets:
    """The dynamic communicators and TE's own of one exact shape, in one process; TE's table names one of them.

    Both register on the one native communicator of the process, which has room for 31 regions: two sets of twelve.
    """

    def __init__(self, world: World, capacity: int, hidden: int, exact: int | None, exact_first: bool = False) -> None:
        import transformer_engine.pytorch.module.base as base

        self._base, self._world = base, world
        self.capacity, self.hidden = capacity, hidden
        self._exact: dict[Any, Any] = {}
        self._helpers: list[Any] = []  # TE's bootstrap object, which the shared communicator calls for the second set
        if exact is not None and exact_first:
            self._make_exact(exact)
        base._ub_communicators = None
        self.manager = initialise(world, [capacity, hidden])
        self._dynamic = base._ub_communicators
        if exact is not None and not exact_first:
            self._make_exact(exact)
        self.use("unguarded")

    def _make_exact(self, tokens: int) -> None:
        import transformer_engine_torch as tex

        make = tex.CommOverlapHelper

        def keep(*groups: Any) -> Any:
            self._helpers.append(make(*groups))
            return self._helpers[-1]

        self._base._ub_communicators = None
        with (
            mock.patch.object(tex, "CommOverlapHelper", keep),
            mock.patch.object(dist, "new_group", return_value=self._world.control),  # TE would leave one behind
        ):
            self._base.initialize_ub(
                [tokens, self.hidden],
                self._world.size,
                quantization_modes=quantization_modes(["none"]),
                dtype=torch.bfloat16,
                bootstrap_backend="gloo",
            )
        self._exact = self._base._ub_communicators

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
        self._helpers.clear()


@dataclass
class Steps:
    """The layer, its operands, and blocks of steps in each arm."""

    world: World
    sets: Sets
    layer: torch.nn.Module
    operands: torch.Tensor
    parameters: list[torch.nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.layer.parameters())

    def block(self, arm: str, tokens: int, steps: int) -> float:
        """Milliseconds a step, on the device, of ``steps`` steps at T = ``tokens`` (``pad``: at capacity)."""
        rows = (self.sets.capacity if arm == "pad" else tokens) // self.world.size
        self.sets.use(arm)
        leaf, grad = self.operands[0, :rows].detach().requires_grad_(), self.operands[1, :rows]
        one = self.arm(arm)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with _no_collection():
            for _ in range(WARM):
                one(leaf, grad, tokens)
            begin.record()
            for _ in range(steps):
                one(leaf, grad, tokens)
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / steps

    def arm(self, name: str) -> Callable[[torch.Tensor, torch.Tensor, int], None]:
        return {"active": self.set, "unguarded": self.set, "auto": self.auto}.get(name, self.plain)

    def set(self, leaf: torch.Tensor, grad: torch.Tensor, tokens: int) -> None:
        with self.sets.manager.active_shape([tokens, self.sets.hidden]):
            self.plain(leaf, grad, tokens)

    def auto(self, leaf: torch.Tensor, grad: torch.Tensor, tokens: int) -> None:
        self.plain(leaf, grad, tokens)
        self.sets.manager.reset_active_shape()  # as many changes as active_shape makes

    def plain(self, leaf: torch.Tensor, grad: torch.Tensor, _tokens: int) -> None:
        self.layer(leaf).backward(grad)
        leaf.grad = None
        for parameter in self.parameters:
            parameter.grad = None


def rounds_of(count: int) -> list[list[int]]:
    """Orders of an even number of arms in which each follows each other equally often (Williams 1949)."""
    first = [0]
    for step in range(1, count):
        first.append((first[-1] + (step if step % 2 else -step)) % count)
    return [[(arm + turn) % count for arm in first] for turn in range(count)]


def interleaved(steps: Steps, arms: Sequence[str], tokens: int, until: float, least: int = 2) -> dict[str, list[float]]:
    """Milliseconds of every block of every arm, the slowest rank's: as many whole sets of rounds as end before
    ``until`` (monotonic seconds), and ``least`` in any case. The blocks of one round have the same index.
    """
    slowest = {arm: max(steps.world.gather(steps.block(arm, tokens, 5))) for arm in arms}
    counts = {arm: max(5, round(1000 * BLOCK_S / ms)) for arm, ms in slowest.items()}
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    done, duration = 0, 0.0
    while done < least or max(steps.world.gather(time.monotonic() + duration)) < until:
        begin = time.monotonic()
        steps.world.barrier()
        gc.collect()
        for order in rounds_of(len(arms)):
            for index in order:
                arm = arms[index]
                taken[arm].append(steps.block(arm, tokens, counts[arm]))
        done, duration = done + 1, time.monotonic() - begin
    ranks = steps.world.gather(taken)
    return {arm: [max(blocks) for blocks in zip(*(rank[arm] for rank in ranks), strict=True)] for arm in arms}


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """The median of the ratios of blocks of the same round, and the half width of its 95 % interval."""
    found = sorted(one / other for one, other in zip(over, under, strict=True))
    count = len(found)
    rank = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return statistics.median(found), (found[count - 1 - rank] - found[rank]) / 2


def measure(world: World, options: argparse.Namespace, add: Add) -> None:
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled here runs as it is, in every arm
    keep_to_own_processors(world)
    capacity, hidden = options.capacity, options.hidden
    operands = random_tensor((2, capacity // world.size, hidden), world, 1)
    sets = Sets(world, capacity, hidden, None)  # TE wants UserBuffers before it makes a layer that overlaps
    layer = build(KIND, OVERLAPS["default"], hidden, world)
    steps = Steps(world, sets, layer, operands)
    for tokens in (capacity, capacity // 2, capacity // 4):  # TE's fused functions are compiled, for other T too
        steps.block("active", tokens, 1)
    sets.close()
    gc.collect()
    gc.freeze()  # the compiler's modules, so that a collection between rounds takes no time
    start = max(world.gather(time.monotonic()))
    seconds = options.seconds - (start - _START) - 4.0
    for fraction in FRACTIONS:
        until = start + seconds * sum(share for other, share in SHARES.items() if other >= fraction)
        row = one_length(world, layer, operands, options, fraction, until)
        add({"kind": "step", **row})
        if world.rank == 0:
            print({key: round(value, 4) for key, value in row.items()}, flush=True)
    add({"kind": "lengths", **_lengths(world, layer, operands, options, start + seconds)})


def one_length(
    world: World,
    layer: torch.nn.Module,
    operands: torch.Tensor,
    options: argparse.Namespace,
    fraction: float,
    until: float,
) -> dict[str, Any]:
    """A row: T = ``fraction`` of the capacity."""
    tokens = int(options.capacity * fraction)
    arms = ("exact", "active", "unguarded", "auto") if fraction == SMALLEST else ("exact", "active")
    taken: dict[str, list[float]] = {arm: [] for arm in (*arms, "pad", "active beside pad")}
    begin = time.monotonic()
    until -= 2.0  # what the comparison with pad takes
    for number, exact_first in enumerate((False, True)):
        sets = Sets(world, options.capacity, options.hidden, tokens, exact_first)
        steps = Steps(world, sets, layer, operands)
        end = begin + (until - begin) * (number + 1) / 2
        for arm, blocks in interleaved(steps, arms, tokens, end).items():
            taken[arm] += blocks
        if exact_first:
            beside = interleaved(steps, ("active", "pad"), tokens, 0.0)
            taken["pad"], taken["active beside pad"] = beside["pad"], beside["active"]
        sets.close()
    row: dict[str, Any] = {"tokens": tokens, "capacity_fraction": fraction, "blocks": len(taken["exact"])}
    for arm in (*arms, "pad"):
        row[f"{arm}_ms"] = statistics.median(taken[arm])
    row["active_over_exact"], row["active_over_exact_interval"] = ratio(taken["active"], taken["exact"])
    row["active_over_pad"], row["active_over_pad_interval"] = ratio(taken["active beside pad"], taken["pad"])
    row["active_over_pad_excess"] = row["active_over_pad"] - fraction
    if "auto" in arms:
        for arm, name in (("active", "guard"), ("auto", "auto")):
            cost, row[f"{name}_cost_interval"] = ratio(taken[arm], taken["unguarded"])
            row[f"{name}_cost_fraction"] = cost - 1
    return row


def _lengths(
    world: World, layer: torch.nn.Module, operands: torch.Tensor, options: argparse.Namespace, until: float
) -> dict[str, Any]:
    """Real microbatches, four source files of the standard library each, dynamic and padded to capacity in turns."""
    capacity = options.capacity
    tokens = real_lengths(options.microbatches, world.size, capacity)
    sets = Sets(world, capacity, options.hidden, None)
    steps = Steps(world, sets, layer, operands)
    totals: dict[str, list[float]] = {"active": [], "pad": []}
    duration = 0.0
    while len(totals["pad"]) < 2 or max(world.gather(time.monotonic() + duration)) < until:
        begin = time.monotonic()
        for arm in ("active", "pad", "pad", "active"):
            totals[arm].append(_epoch(steps, arm, tokens))
        duration = time.monotonic() - begin
    slowest = {arm: [max(each) for each in zip(*world.gather(taken), strict=True)] for arm, taken in totals.items()}
    sets.close()
    time_ratio, interval = ratio(slowest["active"], slowest["pad"])
    tokens_ratio = sum(tokens) / (len(tokens) * capacity)
    return {
        "microbatches": len(tokens),
        "epochs": len(slowest["pad"]),
        "token_ratio": tokens_ratio,
        "active_ms": statistics.median(slowest["active"]),
        "pad_ms": statistics.median(slowest["pad"]),
        "time_ratio": time_ratio,
        "time_ratio_interval": interval,
        "time_over_token_ratio": time_ratio / tokens_ratio,
    }


def _epoch(steps: Steps, arm: str, tokens: Sequence[int]) -> float:
    """Milliseconds of one pass over all microbatches, one step each, without a pause between them."""
    steps.block(arm, tokens[0], 1)
    rows = [(steps.sets.capacity if arm == "pad" else each) // steps.world.size for each in tokens]
    leaves = [steps.operands[0, :count].detach().requires_grad_() for count in rows]
    one = steps.arm(arm)
    steps.world.barrier()
    with _no_collection():
        begin = time.perf_counter()
        for each, count, leaf in zip(tokens, rows, leaves, strict=True):
            one(leaf, steps.operands[1, :count], each)
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begin)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def real_lengths(count: int, tp: int, capacity: int) -> list[int]:
    """T of ``count`` microbatches of the CPU example (``examples/train_packed.py``), scaled so that the largest is
    the capacity.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from packed.data import draw, read_documents

    documents = draw(read_documents(2048), 4 * count, seed=0)
    plan = plan_fixed_count([len(document) for document in documents], 4, tp=tp)
    scale = capacity / plan.max_tokens
    return [min(capacity, -(-int(tokens * scale) // tp) * tp) for tokens in plan.tokens]


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    steps = [row for row in rows if row["kind"] == "step"]
    lengths = [row for row in rows if row["kind"] == "lengths"]
    largest = {
        "active_over_exact_max": "active_over_exact",
        "active_over_exact_interval_max": "active_over_exact_interval",
        "active_over_pad_excess_max": "active_over_pad_excess",
        "guard_cost_fraction": "guard_cost_fraction",
        "auto_cost_fraction": "auto_cost_fraction",
        "guard_cost_interval": "guard_cost_interval",
        "auto_cost_interval": "auto_cost_interval",
    }
    made: dict[str, float] = {}
    for figure, key in largest.items():
        if found := [row[key] for row in steps if key in row]:
            made[figure] = max(found)
    if lengths:
        made["lengths_time_over_token_ratio"] = max(row["time_over_token_ratio"] for row in lengths)
    return made


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=200)
    options.add_argument("--hidden", type=int, default=4096)
    options.add_argument("--capacity", type=int, default=16384)
    options.add_argument("--seconds", type=float, default=150, help="for each start, imports included")
    options.add_argument("--microbatches", type=int, default=24)
    raise SystemExit(_one_gpu.main("te_step", options.parse_args(), measure, figures))

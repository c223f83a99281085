# SPDX-License-Identifier: Apache-2.0
"""``bench tp-step``: a training step at T, dynamic, made for exactly T, padded to capacity, rebuilt, without overlap.

One step is forward and backward. What makes the comparison fair: a block starts with a drained device and steps that
are not timed; every arm follows every other equally often (an arm that follows ``pad`` would meet a hotter, slower
GPU, so ``pad`` is measured apart, against ``dynamic``); half of the blocks run with the dynamic buffers first in
memory, half with the exact ones; Python's garbage collector is off in blocks, and every rank keeps to processors of
its own. A ratio is the median of those between blocks of the same round, ``*_low`` and ``*_high`` the ends of its 95 %
interval; the figures are the largest of these medians, and half the width of the widest interval. ``*_blocks_ms``:
every block in order, for what a median hides.
``rebuild``: the exact step and ``initialize_ub`` with ``destroy_ub`` before it.

Random operands take a large GPU to its power limit, where its clocks, and every step, go up and down by several
percent. Of zeros (inputs, gradients and weights) it multiplies faster, at a higher and steadier clock, so that a ratio
can be told to a few tenths of a percent (Horace He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given
Predictable Data!", 2024); what a dynamic step adds weighs more there, since the step is shorter.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..errors import UBShapeError, UBUnsupportedError
from ..policy import Policy
from ..testing.te_layers import attention_heads
from .interleave import Ratio, interleaved, ratio, slowest, spread
from .report import Budget, Report
from .worlds import HostWorld, TEWorld, World, refusal

ARMS = ("dynamic", "exact", "pad", "rebuild", "none", "policy")
OPERANDS = ("random", "zeros")
COSTS = ("unguarded", "auto")  # asked for at the smallest T, since a step is shortest there
_APART = ("pad", "rebuild")


class Steps(Protocol):
    """``block_ms``: how long a block takes, about, besides the steps before it that are not timed."""

    block_ms: float

    def block(self, arm: str, tokens: int, steps: int) -> float:
        """Milliseconds a step."""

    def epoch(self, arm: str, tokens: Sequence[int]) -> float:
        """Milliseconds of all microbatches of these T, one step each."""

    def policy(self, tokens: int) -> dict[str, Any]:
        """What the policy chose at T, in words for a row."""

    def close(self) -> None:
        """Give the communicators back."""


Factory = Callable[..., Steps]
"""``(exact, exact_first)`` -> steps, with communicators for exactly ``exact`` tokens beside the dynamic ones."""


def factory_of(world: World, options: Mapping[str, Any], policy: Policy | None) -> Factory:
    """For this world; options ``capacity``, ``hidden``, ``ffn``, ``layer`` (TE only), ``arms``, ``operands``."""
    capacity, hidden, ffn = options["capacity"], options["hidden"], options["ffn"]
    zeros = options.get("operands") == "zeros"
    if isinstance(world, HostWorld):
        from .host_steps import HostFactory

        return HostFactory(world, capacity, hidden, ffn, policy, zeros)
    from .te_steps import TEFactory

    assert isinstance(world, TEWorld)
    layer = options.get("layer", "te.LayerNormMLP")
    check_te_layer(layer, hidden, ffn, world.size)
    return TEFactory(world.world, capacity, hidden, layer, "none" in options["arms"], policy, zeros)


def supported(world: World, arms: Sequence[str], policy: Policy | None, report: Report) -> tuple[str, ...]:
    """The arms that this world can compare; the others are refused with the reason."""
    found = []
    for arm in arms:
        reason = not_comparable(world.mode, arm, policy)
        if reason is None:
            found.append(arm)
        else:
            report.refused(reason)
    return tuple(found)


def not_comparable(mode: str, arm: str, policy: Policy | None) -> str | None:
    """Why an arm is left out, or None."""
    if arm == "policy" and policy is None:
        return "policy: there is no table; --policy FILE gives one"
    return refusal(mode, arm)


def check_arms(bench: str, arms: Sequence[str]) -> None:
    """Raise :class:`UBShapeError` unless the arms that are left can be compared by ``bench``."""
    if bench == "lengths":
        alone = "dynamic" not in arms and ("pad" in arms or not arms)
    else:
        alone = not set(arms) - {*_APART} or ("rebuild" in arms and not {"dynamic", "exact"} & {*arms})
    if alone:
        raise UBShapeError(
            f"arms = {','.join(arms) or 'none that can be compared here'}: they are compared with dynamic; the next "
            f"valid value is {','.join(['dynamic', *arms])}"
        )


def check_te_layer(layer: str, hidden: int, ffn: int, tp: int) -> None:
    """Raise :class:`UBUnsupportedError` or :class:`UBShapeError` for sizes that TE's ``layer`` is not measured with."""
    if ffn != 4 * hidden:
        raise UBUnsupportedError(f"TE's layers are measured with ffn = 4 H = {4 * hidden} here, not {ffn}")
    heads = attention_heads(hidden)
    if layer == "te.TransformerLayer" and (hidden % heads or heads % tp):
        unit = 64 * tp
        raise UBShapeError(
            f"hidden = {hidden}: its {heads} attention heads cannot be cut for tp = {tp}; the next valid value is "
            f"{max(-(-hidden // unit) * unit, 512)}"
        )


def measure(world: World, options: Mapping[str, Any], report: Report) -> None:
    """Options: ``capacity``, ``hidden``, ``ffn``, ``tokens`` (a list of T), ``arms``, ``seconds``, ``policy``, and
    ``costs``, False without :data:`COSTS`.
    """
    from .op import load_policy

    policy = load_policy(world, options)
    arms = supported(world, options["arms"], policy, report)
    steps_of = factory_of(world, {**options, "arms": arms}, policy)
    settle(world)
    lengths = sorted(options["tokens"], reverse=True)
    asked = COSTS if options.get("costs", True) else ()
    weights = {tokens: float(len(arms)) + (2 * len(asked) if tokens == lengths[-1] else 0) for tokens in lengths}
    budget = Budget(options["seconds"], weights)
    for number, tokens in enumerate(lengths):
        report.progress(number, len(lengths), f"T = {tokens}")
        costs = asked if tokens == lengths[-1] else ()
        row = one_length(world, steps_of, options, tokens, (*arms, *costs), budget.until(tokens))
        report.row({"kind": "step", "tp": world.size, **row})
    report.progress(len(lengths), len(lengths), "done")


def settle(world: World) -> None:
    """What start-up left behind stays, so that a collection between rounds takes no time."""
    gc.collect()
    gc.freeze()
    world.meet()


def one_length(
    world: World, steps_of: Factory, options: Mapping[str, Any], tokens: int, arms: Sequence[str], until: float
) -> dict[str, Any]:
    """A row at T = ``tokens``."""
    capacity = options["capacity"]
    fraction = tokens / capacity
    together = tuple(arm for arm in arms if arm not in _APART)
    taken: dict[str, list[float]] = {arm: [] for arm in (*together, "pad", "dynamic beside pad")}
    begin = time.monotonic()
    until -= (until - begin) * 0.15  # what the comparison with pad takes
    exact = tokens if "exact" in arms else None
    chosen: dict[str, Any] = {}
    for number, exact_first in enumerate((False, True)):
        steps = steps_of(exact, exact_first)
        block, block_ms = _at(steps, tokens), steps.block_ms
        end = begin + (until - begin) * (number + 1) / 2
        compare = functools.partial(interleaved, block=block, gather=world.gather, block_ms=block_ms, least_steps=2)
        for arm, blocks in compare(together, until=end, least=1, settle=True).items():
            taken[arm] += blocks
        if exact_first and "pad" in arms:
            beside = compare(("dynamic", "pad"), until=0.0)
            taken["pad"], taken["dynamic beside pad"] = beside["pad"], beside["dynamic"]
        if "policy" in arms:
            chosen = steps.policy(tokens)
        steps.close()
    row: dict[str, Any] = {
        "layer": options.get("layer", "MLP"),
        "hidden": options["hidden"],
        "tokens": tokens,
        "capacity_fraction": fraction,
        "operands": options.get("operands", OPERANDS[0]),
        "blocks": len(taken[together[0]]),
    }
    row |= _times(taken) | _ratios(taken, fraction) | chosen
    if "rebuild" in arms:
        step = row["exact_ms"] if "exact_ms" in row else row["dynamic_ms"]
        row["rebuild_ms"] = reinitialise_ms(world, tokens, options["hidden"]) + step
    return row


def _at(steps: Steps, tokens: int) -> Callable[[str, int], float]:
    return lambda arm, count: steps.block(arm, tokens, count)


def _times(taken: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of every arm the median, the spread, and the blocks themselves."""
    row: dict[str, Any] = {}
    for arm, times in taken.items():
        if times and " " not in arm:
            row |= {f"{arm}_ms": statistics.median(times), f"{arm}_spread_ms": spread(times)}
        if times:
            row[f"{arm.replace(' ', '_')}_blocks_ms"] = [round(ms, 4) for ms in times]
    return row


_COMPARED = {
    "active_over_exact": ("dynamic", "exact"),
    "active_over_pad": ("dynamic beside pad", "pad"),
    "active_over_none": ("dynamic", "none"),
    "policy_over_exact": ("policy", "exact"),
    "policy_over_none": ("policy", "none"),
}


def _ratios(taken: Mapping[str, Sequence[float]], fraction: float) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, (over, under) in _COMPARED.items():
        if taken.get(over) and taken.get(under):
            row |= ratio(taken[over], taken[under]).fields(name)
    if "active_over_pad" in row:
        row["active_over_pad_excess"] = row["active_over_pad"] - fraction
    for arm, name in (("dynamic", "guard"), ("auto", "auto")):
        if taken.get(arm) and taken.get("unguarded"):
            found = ratio(taken[arm], taken["unguarded"])
            cost = Ratio(found.median - 1, found.low - 1, found.high - 1)
            row |= cost.fields(f"{name}_cost_fraction")
    return row


def reinitialise_ms(world: World, tokens: int, hidden: int, cycles: int = 3) -> float:
    """Milliseconds of one ``initialize_ub`` at T and one ``destroy_ub``, the median over the slowest ranks."""
    times = []
    for _ in range(cycles):
        world.meet()
        begin = time.perf_counter()
        world.initialize(tokens, hidden)
        world.destroy()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(slowest(world.gather, times))


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest ratio over all T, of every kind that was measured."""
    keys = {
        "active_over_exact_max": "active_over_exact",
        "active_over_pad_excess_max": "active_over_pad_excess",
        "active_over_none_max": "active_over_none",
        "policy_over_exact_max": "policy_over_exact",
        "policy_over_none_max": "policy_over_none",
        "guard_cost_fraction": "guard_cost_fraction",
        "auto_cost_fraction": "auto_cost_fraction",
    }
    intervals = {
        "active_over_exact_interval_max": "active_over_exact",
        "guard_cost_interval": "guard_cost_fraction",
        "auto_cost_interval": "auto_cost_fraction",
    }
    steps = [row for row in rows if row.get("kind") == "step"]
    made: dict[str, float] = {}
    for figure, key in keys.items():
        if found := [row[key] for row in steps if key in row]:
            made[figure] = max(found)
    for figure, key in intervals.items():
        if widths := [row[f"{key}_high"] - row[f"{key}_low"] for row in steps if f"{key}_high" in row]:
            made[figure] = max(widths) / 2
    if lengths := [row["time_over_token_ratio"] for row in rows if row.get("kind") == "lengths"]:
        made["lengths_time_over_token_ratio"] = max(lengths)
    return made

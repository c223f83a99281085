# SPDX-License-Identifier: Apache-2.0
"""Dynamic UserBuffers at T against UserBuffers that TE made for exactly T: bitwise, every output and
gradient.

One pass with one set of buffers at capacity keeps every result on the device; a second pass makes TE's own
buffers for each T in turn, repeats each step and compares. Both passes run the same steps in the same order,
so that the state of delayed scaling is the same in both as long as the bits are.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import ub_dynamic as ubd

from .te_layers import (
    KINDS,
    OVERLAPS,
    build,
    differing,
    outside_tolerance,
    random_input,
    recipe_of,
    relative_error,
    step,
)
from .te_world import World, poison, quantization_modes, stock_userbuffers

Results = dict[tuple[int, str, str], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Sweep:
    """Layer kinds and recipes of one quantization mode that share one choice of overlap and one list of T."""

    overlap: str
    recipes: tuple[str, ...]
    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    hidden: int
    capacity: int

    @property
    def mode(self) -> str:
        return "none" if self.recipes == ("bf16",) else "fp8"


@dataclass(frozen=True)
class Row:
    """One layer kind with one recipe in one sweep, as a row of a result file."""

    tp: int
    overlap: str
    recipe: str
    layer: str
    cases: int
    mismatches: int
    tensors: int
    first_difference: str
    plain_cases: int
    plain_outside_te_tolerance: int
    plain_relative_error: float


def random_lengths(count: int, multiple: int, capacity: int, seed: int) -> tuple[int, ...]:
    """``count`` multiples of ``multiple``: the smallest, capacity and their neighbours, then a random walk
    that rises, one that falls and one that jumps.
    """
    choose = random.Random(seed)
    ends = [capacity, multiple, capacity - multiple, 2 * multiple]
    others = [choose.randrange(1, capacity // multiple + 1) * multiple for _ in range(max(0, count - len(ends)))]
    third = len(others) // 3
    rising, falling, jumping = others[:third], others[third : 2 * third], others[2 * third :]
    return tuple((ends + sorted(rising) + sorted(falling, reverse=True) + jumping)[:count])


def sweeps(tp: int, count: int, hidden: int, capacity: int, *, seed: int = 20261130) -> tuple[Sweep, ...]:
    """Every layer kind with every method, in BF16 and with both FP8 recipes.

    cuBLAS takes FP8 operands in multiples of 16, a rank's own rows too, so T is a multiple of ``16 * tp`` there.
    """
    found = []
    for index, overlap in enumerate(OVERLAPS.values()):
        # DGRAD+RS is a matter of column-parallel layers; the fused operations choose bulk overlaps by
        # themselves
        kinds = tuple(
            kind.name
            for kind in KINDS.values()
            if not overlap.dgrad_rs or (kind.column and not kind.name.startswith("te.ops"))
        )
        for recipes, multiple in ((("bf16",), tp), (("delayed", "current"), 16 * tp)):
            lengths = random_lengths(count, multiple, capacity, seed + 10 * index + len(recipes))
            found.append(Sweep(overlap.name, recipes, kinds, lengths, hidden, capacity))
    return tuple(found)


def run_sweep(world: World, sweep: Sweep, plain_cases: int = 4) -> list[Row]:
    """Both passes of one sweep; the same rows on every rank.

    ``plain_cases``: for so many of the lengths, the layer without overlap (NCCL) is run too.
    """
    with _unfused_attention():
        found = dynamic_pass(world, sweep)
        differences = exact_pass(world, sweep, found)
        errors, outside = plain_pass(world, sweep, found, plain_cases)
    rows = []
    for recipe in sweep.recipes:
        for kind in sweep.kinds:
            keys = [key for key in found if key[1:] == (recipe, kind)]
            wrong = [(key[0], differences[key]) for key in keys if differences[key]]
            first = ""
            if wrong:
                index, tensors = wrong[0]
                first = f"T = {sweep.lengths[index]}: {', '.join(f'{k} {v:.1e}' for k, v in tensors.items())}"
            rows.append(
                Row(
                    world.size,
                    sweep.overlap,
                    recipe,
                    kind,
                    len(keys),
                    len(wrong),
                    sum(len(found[key]) for key in keys),
                    first,
                    min(plain_cases, len(sweep.lengths)),
                    outside[recipe, kind],
                    max(errors[recipe, kind], default=0.0),
                )
            )
    return _worst_of_ranks(world, rows)


@contextlib.contextmanager
def _unfused_attention() -> Iterator[None]:
    """TE's attention without cuDNN, which makes a new plan for every T; attention is not what is compared."""
    with mock.patch.dict(os.environ, {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}):
        yield


def initialize_dynamic(world: World, sweep: Sweep, **options: Any) -> ubd.Manager:
    """``initialize_ub`` at capacity for this sweep."""
    overlap = OVERLAPS[sweep.overlap]
    return ubd.initialize_ub(
        [sweep.capacity, sweep.hidden],
        world.size,
        quantization_modes=quantization_modes([sweep.mode]),
        dtype=torch.bfloat16,
        ub_cfgs=None if overlap.ub_cfgs is None else dict(overlap.ub_cfgs),
        bootstrap_backend="gloo",
        backend="te",
        **options,
    )


def dynamic_pass(world: World, sweep: Sweep, *, auto: bool = False) -> Results:
    """Every step with one set of buffers at capacity, all of them filled with NaN before each step.

    With ``auto`` the shape is never set; the operands set it.
    """
    initialize_dynamic(world, sweep, auto=auto)
    try:
        layers = _layers(world, sweep, True)
        found: Results = {}
        for index, tokens in enumerate(sweep.lengths):
            for (recipe, kind), layer in layers.items():
                poison(world)
                if not auto:
                    ubd.set_ub_active_shape([tokens, sweep.hidden])
                found[index, recipe, kind] = _step(world, sweep, index, recipe, kind, layer)
        world.barrier()
    finally:
        ubd.destroy_ub()
    return found


def exact_pass(world: World, sweep: Sweep, found: Results) -> dict[tuple[int, str, str], dict[str, float]]:
    """Every step again with TE's buffers made for its T; the differing tensors of every step."""
    differences: dict[tuple[int, str, str], dict[str, float]] = {}
    layers = None
    for index, tokens in enumerate(sweep.lengths):
        with stock_userbuffers(world, [tokens, sweep.hidden], (sweep.mode,), OVERLAPS[sweep.overlap].ub_cfgs):
            # TE wants UserBuffers before it makes a layer that overlaps
            layers = _layers(world, sweep, True) if layers is None else layers
            for (recipe, kind), layer in layers.items():
                world.barrier()  # nothing keeps a fast rank from overtaking between two all-gathers in a row
                key = index, recipe, kind
                differences[key] = differing(found[key], _step(world, sweep, *key, layer))
    return differences


def plain_pass(
    world: World, sweep: Sweep, found: Results, cases: int
) -> tuple[dict[tuple[str, str], list[float]], dict[tuple[str, str], int]]:
    """The first ``cases`` lengths without overlap, over NCCL: relative errors, and tensors outside TE's
    tolerances."""
    layers = _layers(world, sweep, False)
    errors: dict[tuple[str, str], list[float]] = {pair: [] for pair in layers}
    outside = dict.fromkeys(layers, 0)
    for index in range(min(cases, len(sweep.lengths))):
        for (recipe, kind), layer in layers.items():
            key = index, recipe, kind
            for name, value in _step(world, sweep, *key, layer).items():
                errors[recipe, kind].append(relative_error(found[key][name], value))
                if "layer_norm" not in name:  # as in TE's own test
                    outside[recipe, kind] += outside_tolerance(found[key][name], value, recipe != "bf16")
    return errors, outside


def _layers(world: World, sweep: Sweep, on: bool) -> dict[tuple[str, str], torch.nn.Module]:
    from transformer_engine.pytorch import fp8

    # Forget the amax buffers of the layers of the pass before; the state lives beside the layers.
    fp8.FP8GlobalStateManager.reset()
    overlap = OVERLAPS[sweep.overlap]
    return {
        (recipe, kind): build(KINDS[kind], overlap, sweep.hidden, world, on)
        for recipe in sweep.recipes
        for kind in sweep.kinds
    }


def _step(
    world: World, sweep: Sweep, index: int, recipe: str, kind: str, layer: torch.nn.Module
) -> dict[str, torch.Tensor]:
    operand = random_input(KINDS[kind], sweep.lengths[index], sweep.hidden, world, seed=index)
    return step(layer, operand, world, recipe_of(recipe))


def _worst_of_ranks(world: World, rows: Sequence[Row]) -> list[Row]:
    """For each row that of the rank with most mismatches, with the largest error of all."""
    merged = []
    for same in zip(*world.gather(list(rows)), strict=True):
        worst = max(same, key=lambda row: (row.mismatches, row.plain_outside_te_tolerance))
        error = max(row.plain_relative_error for row in same)
        merged.append(Row(**{**worst.__dict__, "plain_relative_error": error}))
    return merged

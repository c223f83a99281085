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
from dataclasses import dataclass, replace
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
from .te_world import World, poison, quantization_modes, stock_userbuffers, ub_cfgs_with_room

Key = tuple[int, str, str]  # index of T, recipe, layer kind
Results = dict[Key, dict[str, torch.Tensor]]
_REPEATS = 3  # so often TE runs a step again that differs


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
    """One layer kind with one recipe in one sweep, as a row of a result file.

    ``mismatches``: cases in which dynamic and exact buffers differ in any bit; ``unrepeatable`` of them are cases in
    which stock TE, run again with its exact buffers, differs from itself. The rest is for ``plain_cases``
    against the layer without overlap: relative error (the largest) and tensors outside TE's own tolerances, of
    dynamic buffers (``plain_*``) and of TE's exact ones (``stock_*``); ``outside_beyond_stock`` are those that are
    outside with dynamic buffers only.
    """

    tp: int
    overlap: str
    recipe: str
    layer: str
    cases: int
    mismatches: int
    unrepeatable: int
    tensors: int
    first_difference: str
    plain_cases: int
    plain_relative_error: float
    stock_relative_error: float
    plain_outside_te_tolerance: int
    stock_outside_te_tolerance: int
    outside_beyond_stock: int


@dataclass
class _Plain:
    """What the comparison with the layer without overlap has found so far."""

    error: float = 0.0
    stock_error: float = 0.0
    outside: int = 0
    stock_outside: int = 0
    beyond: int = 0


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


def sweeps(
    tp: int, count: int, hidden: int, capacity: int, *, seed: int = 20261130, fused_fp8: bool = True
) -> tuple[Sweep, ...]:
    """Every layer kind with every method, in BF16 and with both FP8 recipes.

    cuBLAS takes FP8 operands in multiples of 16, a rank's own rows too, so T is a multiple of ``16 * tp`` there.
    ``fused_fp8``: whether TE's fused operations run in FP8, see :func:`fused_fp8_runs`.
    """
    found = []
    for index, overlap in enumerate(OVERLAPS.values()):
        for recipes, multiple in ((("bf16",), tp), (("delayed", "current"), 16 * tp)):
            if overlap.fp8_only and recipes == ("bf16",):
                continue
            # DGRAD+RS is a matter of column-parallel layers; the fused operations choose bulk overlaps by themselves.
            fused = not overlap.dgrad_rs and (fused_fp8 or recipes == ("bf16",))
            kinds = tuple(
                kind.name
                for kind in KINDS.values()
                if (kind.column or not overlap.dgrad_rs) and (fused or not kind.name.startswith("te.ops"))
            )
            lengths = random_lengths(count, multiple, capacity, seed + 10 * index + len(recipes))
            found.append(Sweep(overlap.name, recipes, kinds, lengths, hidden, capacity))
    return tuple(found)


def fused_fp8_runs() -> bool:
    """Whether the backward of TE's fused linear takes quantised weights: before 2.14 it asks them for a device, which
    they do not know.
    """
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    return hasattr(Float8TensorStorage, "device")


def refusal(world: World, sweep: Sweep) -> str | None:
    """Why this world cannot run a sweep, or None.

    TE's last split of a pipelined reduce-scatter takes 32 streaming multiprocessors a rank whatever ``num_sm`` says
    (``UB_MAX_SM`` in comm_gemm_overlap.cpp). Those of three ranks leave 36 of an H200's 132 to the fourth, which the
    FP8 dgrad GEMM before its own reduce-scatter was seen not to get: TE's timeout (20 s) then ended the wait.
    """
    if sweep.overlap == "dgrad_pipeline" and world.size > 2 * torch.cuda.device_count():
        return (
            f"{sweep.overlap} {sweep.mode}: {world.size} ranks on {torch.cuda.device_count()} GPU(s) starve each other "
            "in a pipelined dgrad; two ranks a GPU can run it"
        )
    return None


def run_sweep(world: World, sweep: Sweep, plain_cases: int = 4) -> list[Row]:
    """Both passes of one sweep; the same rows on every rank.

    ``plain_cases``: for so many of the lengths, the layer without overlap (NCCL) is run too.
    """
    with _unfused_attention():
        found = dynamic_pass(world, sweep)
        differences, exact, unrepeatable = exact_pass(world, sweep, found, plain_cases)
        plain = plain_pass(world, sweep, found, exact, plain_cases)
    rows = []
    for recipe in sweep.recipes:
        for kind in sweep.kinds:
            keys = [key for key in found if key[1:] == (recipe, kind)]
            wrong = [(key[0], differences[key]) for key in keys if differences[key]]
            first = ""
            if wrong:
                index, tensors = wrong[0]
                first = f"T = {sweep.lengths[index]}: {', '.join(f'{k} {v:.1e}' for k, v in tensors.items())}"
            against = plain[recipe, kind]
            rows.append(
                Row(
                    world.size,
                    sweep.overlap,
                    recipe,
                    kind,
                    len(keys),
                    len(wrong),
                    sum(key in unrepeatable for key in keys),
                    sum(len(found[key]) for key in keys),
                    first,
                    min(plain_cases, len(sweep.lengths)),
                    against.error,
                    against.stock_error,
                    against.outside,
                    against.stock_outside,
                    against.beyond,
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
        ub_cfgs=ub_cfgs_with_room(world, overlap.ub_cfgs),
        bootstrap_backend="gloo",
        backend="te",
        **options,
    )


def dynamic_pass(world: World, sweep: Sweep, *, auto: bool = False) -> Results:
    """Every step with one set of buffers at capacity, all of them filled with NaN before each T.

    With ``auto`` the shape is never set; the operands set it.
    """
    initialize_dynamic(world, sweep, auto=auto)
    try:
        layers = _layers(world, sweep, True)
        found: Results = {}
        for index, tokens in enumerate(sweep.lengths):
            poison(world)
            if not auto:
                ubd.set_ub_active_shape([tokens, sweep.hidden])
            for (recipe, kind), layer in layers.items():
                world.barrier()  # nothing keeps a fast rank from overtaking between two all-gathers in a row
                found[index, recipe, kind] = _step(world, sweep, index, recipe, kind, layer)
        world.barrier()
    finally:
        ubd.destroy_ub()
    return found


def exact_pass(
    world: World, sweep: Sweep, found: Results, keep: int = 0
) -> tuple[dict[Key, dict[str, float]], Results, set[Key]]:
    """Every step again with TE's buffers made for its T: the differing tensors of every step, the results of the first
    ``keep`` lengths, and the steps that differ, and differ too where TE runs them again.
    """
    differences: dict[Key, dict[str, float]] = {}
    kept: Results = {}
    unrepeatable: set[Key] = set()
    layers = None
    for index, tokens in enumerate(sweep.lengths):
        with stock_userbuffers(world, [tokens, sweep.hidden], (sweep.mode,), OVERLAPS[sweep.overlap].ub_cfgs):
            # TE wants UserBuffers before it makes a layer that overlaps
            layers = _layers(world, sweep, True) if layers is None else layers
            for (recipe, kind), layer in layers.items():
                world.barrier()
                key = index, recipe, kind
                exact = _step(world, sweep, *key, layer)
                differences[key] = differing(found[key], exact)
                # Not with delayed scaling, where a step changes the scales of the next.
                if recipe != "delayed" and any(world.gather(bool(differences[key]))):
                    again = [_repeated(world, sweep, key, layer) for _ in range(_REPEATS)]
                    if differences[key] and any(differing(each, exact) for each in again):
                        unrepeatable.add(key)
                if index < keep:
                    kept[key] = exact
    return differences, kept, unrepeatable


def _repeated(world: World, sweep: Sweep, key: Key, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    world.barrier()
    return _step(world, sweep, *key, layer)


def plain_pass(world: World, sweep: Sweep, found: Results, exact: Results, cases: int) -> dict[tuple[str, str], _Plain]:
    """The first ``cases`` lengths without overlap, over NCCL, against both kinds of buffers."""
    layers = _layers(world, sweep, False)
    seen = {pair: _Plain() for pair in layers}
    for index in range(min(cases, len(sweep.lengths))):
        for (recipe, kind), layer in layers.items():
            key, against = (index, recipe, kind), seen[recipe, kind]
            for name, value in _step(world, sweep, *key, layer).items():
                ours, stock = found[key][name], exact[key][name]
                against.error = max(against.error, relative_error(ours, value))
                against.stock_error = max(against.stock_error, relative_error(stock, value))
                if "layer_norm" in name:  # left out as in TE's own test
                    continue
                fp8, fused = recipe != "bf16", kind.startswith("te.ops")
                ours_outside = outside_tolerance(ours, value, fp8, fused)
                stock_outside = outside_tolerance(stock, value, fp8, fused)
                against.outside += ours_outside
                against.stock_outside += stock_outside
                against.beyond += ours_outside and not stock_outside
    return seen


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
    """For each row that of the rank with most mismatches, with the largest of the other figures."""
    merged = []
    for same in zip(*world.gather(list(rows)), strict=True):
        worst = max(same, key=lambda row: (row.mismatches, row.outside_beyond_stock))
        largest = {
            name: max(getattr(row, name) for row in same)
            for name in (
                "plain_relative_error", "stock_relative_error", "plain_outside_te_tolerance",
                "stock_outside_te_tolerance", "outside_beyond_stock",
            )
        }  # fmt: skip
        merged.append(replace(worst, **largest))
    return merged

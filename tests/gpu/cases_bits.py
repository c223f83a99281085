# SPDX-License-Identifier: Apache-2.0
"""Bits: active T equals exact T, for every layer kind, method, recipe; the same without a single call (auto)."""

from __future__ import annotations

import math

import torch
from harness import case, expect, note, userbuffers

import ub_dynamic as ubd
from ub_dynamic.shapes import chunk_layout
from ub_dynamic.testing.te_bits import Sweep, dynamic_pass, fused_fp8_runs, refusal, run_sweep, sweeps
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, build, differing, random_input, recipe_of, step
from ub_dynamic.testing.te_world import World, communicators, stock_userbuffers

HIDDEN, CAPACITY, LENGTHS = 512, 1024, 6
# Relative error of any tensor from the layer without overlap, whose sums have another order (and, in FP8, other
# roundings then). TE's fused linear quantises each rank's rows with the maximum of that rank but reads all of them with
# its own scale, so with current scaling it is off by as much as the maxima differ; no bound there.
BOUNDS = {"bf16": 0.03, "delayed": 0.25, "current": 0.25}


def _check(world: World, overlap: str) -> None:
    for sweep in sweeps(world.size, LENGTHS, HIDDEN, CAPACITY, fused_fp8=fused_fp8_runs()):
        if sweep.overlap != overlap:
            continue
        if reason := refusal(world, sweep):
            note(world, f"left out: {reason}")
            continue
        for row in run_sweep(world, sweep, plain_cases=2):
            where = f"{overlap}, {row.recipe}, {row.layer}"
            expect(world, row.cases == LENGTHS, f"{where}: {row.cases} cases")
            expect(world, row.mismatches == 0, f"{where}: {row.mismatches} differ, first {row.first_difference}")
            beyond = row.outside_beyond_stock
            expect(world, beyond == 0, f"{where}: {beyond} tensors outside TE's tolerances, TE's own buffers inside")
            if row.stock_outside_te_tolerance:
                note(world, f"{where}: TE's own overlap has {row.stock_outside_te_tolerance} tensors outside")
            error = row.plain_relative_error
            if OVERLAPS[overlap].fp8_only or (row.recipe == "current" and row.layer.startswith("te.ops")):
                note(world, f"{where}: TE's own overlap is {row.stock_relative_error:.1e} off the layer without")
                continue
            expect(world, error <= BOUNDS[row.recipe], f"{where}: {error:.1e} from the layer without overlap")


@case(limit_s=240)
def bits_default(world: World) -> None:
    _check(world, "default")


@case(limit_s=240)
def bits_ring_reduce_scatter_and_aggregate(world: World) -> None:
    _check(world, "ring_rs")


@case(limit_s=120)
def bits_dgrad_ring_reduce_scatter(world: World) -> None:
    _check(world, "dgrad_ring")


@case(limit_s=120)
def bits_dgrad_pipeline_reduce_scatter(world: World) -> None:
    _check(world, "dgrad_pipeline")


@case(limit_s=240)
def auto_equals_explicit(world: World) -> None:
    """No set call anywhere: every layer kind and overlap, BF16 and FP8, T that jumps."""
    lengths = (CAPACITY, 16 * world.size, CAPACITY // 2, 32 * world.size, CAPACITY - 16 * world.size)
    for overlap in OVERLAPS.values():
        kinds = tuple(k for k in KINDS if not overlap.dgrad_rs or (KINDS[k].column and "ops" not in k))
        for recipes in (("bf16",), ("current",)):
            if overlap.fp8_only and recipes == ("bf16",):
                continue
            sweep = Sweep(overlap.name, recipes, kinds, lengths, HIDDEN, CAPACITY)
            explicit = dynamic_pass(world, sweep)
            automatic = dynamic_pass(world, sweep, auto=True)
            for key, found in automatic.items():
                wrong = differing(found, explicit[key])
                expect(world, not wrong, f"{overlap.name} {key}: {wrong}")


@case()
def both_quantization_modes_in_one_process(world: World) -> None:
    """[NONE, FP8]: BF16 and FP8 layers in turn, each with its own communicators and one active shape."""
    kind, overlap = KINDS["te.LayerNormMLP"], OVERLAPS["default"]
    lengths = [CAPACITY, 16 * world.size, CAPACITY // 4]
    modes = ("none", "fp8")
    found = []
    with userbuffers(world, CAPACITY, HIDDEN, overlap, modes) as manager:
        expect(world, len(manager.backend.specs) == 20, sorted(manager.backend.specs))
        layers = {recipe: build(kind, overlap, HIDDEN, world) for recipe in ("bf16", "current")}
        for tokens in lengths:
            ubd.set_ub_active_shape([tokens, HIDDEN])
            for recipe, layer in layers.items():
                operand = random_input(kind, tokens, HIDDEN, world)
                found.append(step(layer, operand, world, recipe_of(recipe)))
    for index, tokens in enumerate(lengths):
        with stock_userbuffers(world, [tokens, HIDDEN], modes):
            for offset, (recipe, layer) in enumerate(layers.items()):
                operand = random_input(kind, tokens, HIDDEN, world)
                wrong = differing(found[2 * index + offset], step(layer, operand, world, recipe_of(recipe)))
                expect(world, not wrong, f"T = {tokens}, {recipe}: {wrong}")


@case()
def buffers_lie_where_the_layout_says(world: World) -> None:
    """After a set TE's own get_buffer answers with the view, address and chunk of shapes.chunk_layout."""
    for overlap in OVERLAPS.values():
        with userbuffers(world, CAPACITY, HIDDEN, overlap, (overlap.mode,)) as manager:
            for tokens in (CAPACITY, 2 * world.size, CAPACITY // 2):
                manager.set_active_shape([tokens, HIDDEN])
                for name, spec in manager.backend.specs.items():
                    layout = spec.layout(tokens)
                    assert layout == chunk_layout(
                        spec.method, spec.collective, (CAPACITY, HIDDEN), (tokens, HIDDEN), world.size,
                        spec.dtype, spec.num_splits,
                    )  # fmt: skip
                    problem = _compare(world, name, overlap.mode, layout)
                    expect(world, not problem, f"{overlap.name} {name} T = {tokens}: {problem}")


def _compare(world: World, name: str, mode: str, layout: object) -> str:
    from transformer_engine.pytorch import UserBufferQuantizationMode as Mode

    communicator = communicators()[name.split("/")[0], Mode(mode)]
    whole = communicator.get_buffer()
    if tuple(whole.shape) != layout.view_shape:
        return f"get_buffer has {tuple(whole.shape)}, the layout {layout.view_shape}"
    rows = layout.active[0] // world.size
    local = communicator.get_buffer(local_chunk=True, shape=[rows, HIDDEN])
    offset = local.data_ptr() - whole.data_ptr()
    expected = world.rank * layout.local_numel * local.element_size()
    if offset != expected:
        return f"the local chunk is at {offset}, the layout says {expected}"
    if math.prod(local.shape) != layout.local_numel:
        return f"the local chunk has {math.prod(local.shape)} elements, the layout {layout.local_numel}"
    return ""


@case()
def capacity_is_all_that_is_ever_registered(world: World) -> None:
    """Addresses do not move, nothing is allocated."""
    with userbuffers(world, CAPACITY, HIDDEN) as manager:
        before = {key: communicators()[key].get_buffer().data_ptr() for key in list(communicators())}
        allocated = torch.cuda.memory_allocated()
        for tokens in range(world.size, CAPACITY + 1, world.size):
            manager.set_active_shape([tokens, HIDDEN])
        after = {key: communicators()[key].get_buffer().data_ptr() for key in list(communicators())}
        expect(world, before == after, "an address moved")
        expect(world, torch.cuda.memory_allocated() == allocated, "memory was allocated")

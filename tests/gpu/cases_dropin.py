# SPDX-License-Identifier: Apache-2.0
"""Behind TE's own names: code written for stock TE, at TE's own test configuration, with a second T."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from harness import Failed, case, expect, note

import ub_dynamic as ubd
from ub_dynamic.testing.te_layers import (
    OVERLAPS,
    Overlap,
    autocast,
    collect,
    differing,
    fill_parameters,
    outside_tolerance,
    recipe_of,
    transformer_layer,
)
from ub_dynamic.testing.te_world import (
    World,
    communicators,
    quantization_modes,
    stock_userbuffers,
    ub_cfgs_with_room,
)

# Transformer Engine's tests/pytorch/distributed/run_layer_with_overlap.py
SEQUENCE, BATCH, HEADS, HEAD_DIM = 1024, 2, 32, 48
HIDDEN = HEADS * HEAD_DIM

Build = Callable[[World, Mapping[str, bool]], torch.nn.Module]


def _common(world: World) -> dict[str, Any]:
    return {
        "params_dtype": torch.bfloat16,
        "device": world.device,
        "tp_group": world.tp_group,
        "sequence_parallel": True,
    }


def _linear(mode: str, name: str) -> Build:
    def build(world: World, flags: Mapping[str, bool]) -> torch.nn.Module:
        import transformer_engine.pytorch as te

        return te.Linear(HIDDEN, HIDDEN, parallel_mode=mode, ub_name=name, **flags, **_common(world))

    return build


def _layernorm_linear(world: World, flags: Mapping[str, bool]) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    return te.LayerNormLinear(HIDDEN, 3 * HIDDEN, parallel_mode="column", ub_name="qkv", **flags, **_common(world))


def _layernorm_mlp(world: World, flags: Mapping[str, bool]) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    return te.LayerNormMLP(HIDDEN, 4 * HIDDEN, set_parallel_mode=True, **flags, **_common(world))


def _attention(world: World, flags: Mapping[str, bool]) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    return te.MultiheadAttention(
        HIDDEN,
        HEADS,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        set_parallel_mode=True,
        input_layernorm=True,
        **flags,
        **_common(world),
    )


def _transformer(world: World, flags: Mapping[str, bool]) -> torch.nn.Module:
    return transformer_layer(HIDDEN, world, flags, num_attention_heads=HEADS)


# name -> build, whether the layer takes [S, B, H/tp], whether DGRAD+RS is a configuration of it
LAYERS: dict[str, tuple[Build, bool, bool]] = {
    "Linear row": (_linear("row", "proj"), True, False),
    "Linear column": (_linear("column", "qkv"), False, True),
    "LayerNormLinear": (_layernorm_linear, False, True),
    "LayerNormMLP": (_layernorm_mlp, False, True),
    "MultiheadAttention": (_attention, False, True),
    "TransformerLayer": (_transformer, False, True),
}


Results = dict[tuple[str, int], dict[str, torch.Tensor]]


def _layers(world: World, overlap: Overlap, on: bool) -> dict[str, torch.nn.Module]:
    from transformer_engine.pytorch import fp8

    fp8.FP8GlobalStateManager.reset()  # the amax history of all layers, which every step of one moves on
    layers = {}
    for name, (build, _, dgrad) in LAYERS.items():
        if dgrad or not overlap.dgrad_rs:
            layers[name] = build(world, overlap.flags(on))
            fill_parameters(layers[name], world)
    return layers


def _run(world: World, name: str, layer: torch.nn.Module, sequence: int, recipe: str) -> dict[str, torch.Tensor]:
    row = LAYERS[name][1]
    shape = (sequence, BATCH, HIDDEN // world.size) if row else (sequence // world.size, BATCH, HIDDEN)
    generator = torch.Generator(world.device).manual_seed(sequence + world.rank)
    operand = torch.rand(shape, generator=generator, device=world.device, dtype=torch.bfloat16)
    return _summed(world, layer, operand, recipe)


def _through_te(world: World, overlap: Overlap, mode: str, recipe: str, sequences: list[int]) -> None:
    """With another S in the same process: bits of TE's own buffers for each S, and TE's tolerances of the layer
    without overlap where TE's own buffers keep them.
    """
    found: Results = {}

    def run() -> None:
        import transformer_engine.pytorch as te

        layers = _layers(world, overlap, True)
        for sequence in sequences:
            te.set_ub_active_shape([sequence * BATCH, HIDDEN])
            for name, layer in layers.items():
                world.barrier()  # nothing keeps a fast rank from overtaking between two all-gathers in a row
                found[name, sequence] = _run(world, name, layer, sequence, recipe)

    _installed(world, overlap, mode, run)
    layers: dict[str, torch.nn.Module] = {}
    for sequence in sequences:
        with stock_userbuffers(world, [sequence * BATCH, HIDDEN], (mode,), overlap.ub_cfgs):
            layers = layers or _layers(world, overlap, True)
            for name, layer in layers.items():
                world.barrier()
                wrong = differing(found[name, sequence], _run(world, name, layer, sequence, recipe))
                expect(world, not wrong, f"{name}, {overlap.name}, {recipe}, S = {sequence}: {wrong}")
    plain = _layers(world, overlap, False)
    for sequence in sequences:
        for name, layer in plain.items():
            outside = [
                part
                for part, value in _run(world, name, layer, sequence, recipe).items()
                if "layer_norm" not in part  # as TE's own test
                and outside_tolerance(found[name, sequence][part], value, recipe != "bf16")
            ]
            if outside:
                note(world, f"{name}, {overlap.name}, {recipe}, S = {sequence}: TE's own bits are outside: {outside}")


def _summed(world: World, layer: torch.nn.Module, operand: torch.Tensor, recipe: str) -> dict[str, torch.Tensor]:
    leaf = operand.clone().requires_grad_()
    with autocast(recipe_of(recipe), world):
        output = layer(leaf)
    output.sum().backward()  # the loss of TE's own test
    return collect(layer, leaf, output)


def _installed(world: World, overlap: Overlap, mode: str, run: Callable[[], None]) -> None:
    """``run`` with UserBuffers that were made through TE's own names, and taken away through them."""
    import transformer_engine.pytorch as te

    ubd.install()
    try:
        te.initialize_ub(
            [SEQUENCE * BATCH, HIDDEN],
            world.size,
            quantization_modes=quantization_modes([mode]),
            dtype=torch.bfloat16,
            ub_cfgs=ub_cfgs_with_room(world, overlap.ub_cfgs),
            bootstrap_backend="gloo",
        )
        run()
        world.barrier()
        te.destroy_ub()
    except Failed:
        te.destroy_ub()
        raise
    finally:
        ubd.uninstall()


@case(limit_s=120)
def te_layers_at_te_sizes_in_bf16(world: World) -> None:
    for overlap in (OVERLAPS["default"], OVERLAPS["ring_rs"], OVERLAPS["dgrad_ring"]):
        _through_te(world, overlap, "none", "bf16", [SEQUENCE, 384])


@case(limit_s=120)
def te_layers_at_te_sizes_in_fp8(world: World) -> None:
    for recipe in ("delayed", "current"):
        _through_te(world, OVERLAPS["default"], "fp8", recipe, [SEQUENCE, 384])


@case()
def te_names_are_ours_between_install_and_uninstall(world: World) -> None:
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    def names() -> tuple[object, ...]:
        owners = (te, te.module, te.module.base)
        functions = tuple(getattr(owner, name) for owner in owners for name in ("initialize_ub", "destroy_ub"))
        methods = tuple(sorted(vars(kind)) for kind in (tex.CommOverlap, tex.CommOverlapP2P))
        return (*functions, *methods, hasattr(te, "set_ub_active_shape"), tex.generic_gemm)

    before = names()

    def run() -> None:
        te.set_ub_active_shape([512, HIDDEN])
        key = ("qkv_fprop", te.UserBufferQuantizationMode.NONE)
        expect(world, communicators()[key].get_buffer_active_shape() == (512, HIDDEN), "one communicator's shape")
        communicators()[key].set_buffer_active_shape([256, HIDDEN])
        expect(world, communicators()[key].get_buffer_active_shape() == (256, HIDDEN), "a shape of its own")
        capacity = communicators()[key].get_buffer_capacity_shape()
        expect(world, capacity == (SEQUENCE * BATCH, HIDDEN), capacity)

    _installed(world, OVERLAPS["default"], "none", run)
    expect(world, names() == before, "uninstall left a trace")
    expect(world, not communicators(), "te.destroy_ub left communicators")

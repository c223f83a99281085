# SPDX-License-Identifier: Apache-2.0
"""The guard: what stock TE corrupts silently raises before anything is enqueued; hazards of TE are refused."""

from __future__ import annotations

import threading

import torch
from harness import case, expect, expect_raises, note, userbuffers

import ub_dynamic as ubd
from ub_dynamic.testing.te_layers import (
    KINDS,
    OVERLAPS,
    LayerKind,
    Overlap,
    build,
    differing,
    fill_parameters,
    random_input,
    relative_error,
    step,
)
from ub_dynamic.testing.te_world import (
    POISON,
    World,
    communicators,
    poison,
    quantization_modes,
    stock_userbuffers,
)

HIDDEN, CAPACITY = 512, 1024
SHORT, LONG = 256, 512  # the active shape that was forgotten, and the tokens that come
ROW = KINDS["te.Linear row"]


def _expected(world: World, kind: LayerKind, overlap: Overlap, tokens: int) -> dict[str, torch.Tensor]:
    with stock_userbuffers(world, [tokens, HIDDEN], ub_cfgs=overlap.ub_cfgs):
        layer = build(kind, overlap, HIDDEN, world)
        return step(layer, random_input(kind, tokens, HIDDEN, world), world)


def _output(layer: torch.nn.Module, world: World, tokens: int) -> torch.Tensor:
    with torch.no_grad():  # te.Linear row overlaps its reduce-scatter without a gradient too
        return layer(random_input(ROW, tokens, HIDDEN, world))


@case()
def stock_te_corrupts_silently_and_the_guard_raises(world: World) -> None:
    """Reduce-scatter, pipelined and ring, with too small an active shape: no error without the guard."""
    for overlap in (OVERLAPS["default"], OVERLAPS["ring_rs"]):
        expected = _expected(world, ROW, overlap, LONG)
        with userbuffers(world, CAPACITY, HIDDEN, overlap, guard=False):
            layer = build(ROW, overlap, HIDDEN, world)
            ubd.set_ub_active_shape([SHORT, HIDDEN])
            wrong = _output(layer, world, LONG)
            world.barrier()
            error = relative_error(torch.nan_to_num(wrong.float(), 1e3, 1e3, -1e3), expected["output"])
            expect(world, error > 0.1, f"{overlap.name}: stock TE was right (error {error:.1e}); no guard needed?")
        with userbuffers(world, CAPACITY, HIDDEN, overlap):
            layer = build(ROW, overlap, HIDDEN, world)
            poison(world)
            ubd.set_ub_active_shape([SHORT, HIDDEN])
            parts = ["proj_fprop", str(LONG), str(SHORT), f"set_ub_active_shape([{LONG}, {HIDDEN}])"]
            expect_raises(world, ubd.UBShapeError, parts, lambda: _output(layer, world, LONG))  # noqa: B023
            world.barrier()
            expect(world, ubd.get_ub_active_shape() == (SHORT, HIDDEN), "the active shape changed")
            untouched = _all_poison("proj_fprop")
            expect(world, untouched, f"{overlap.name}: something was enqueued before the guard raised")
            ubd.set_ub_active_shape([LONG, HIDDEN])
            expect(world, torch.equal(_output(layer, world, LONG), expected["output"]), "wrong after the error")


def _all_poison(name: str) -> bool:
    from transformer_engine.pytorch import UserBufferQuantizationMode as Mode

    ubd.reset_ub_active_shape()
    return bool((communicators()[name, Mode.NONE].get_buffer().view(torch.uint8) == POISON).all())


@case()
def the_guard_covers_every_way_in(world: World) -> None:
    """Forward and backward of each layer kind with a forgotten shape: raises, then works once it is set."""
    for overlap in OVERLAPS.values():
        for kind in KINDS.values():
            if overlap.fp8_only or (overlap.dgrad_rs and (not kind.column or "ops" in kind.name)):
                continue
            expected = _expected(world, kind, overlap, LONG)
            with userbuffers(world, CAPACITY, HIDDEN, overlap):
                layer = build(kind, overlap, HIDDEN, world)
                for wrong in (SHORT, CAPACITY):
                    ubd.set_ub_active_shape([wrong, HIDDEN])
                    operand = random_input(kind, LONG, HIDDEN, world)
                    parts = [f"{LONG} tokens", f"{wrong} tokens"]
                    expect_raises(world, ubd.UBShapeError, parts, lambda: step(layer, operand, world))  # noqa: B023
                    world.barrier()
                _forgotten_backward(world, kind, layer)
                layer.zero_grad()
                world.barrier()
                ubd.set_ub_active_shape([LONG, HIDDEN])
                found = step(layer, random_input(kind, LONG, HIDDEN, world), world)
                wrong_tensors = differing(found, expected)
                expect(world, not wrong_tensors, f"{overlap.name} {kind.name} after the errors: {wrong_tensors}")


def _forgotten_backward(world: World, kind: LayerKind, layer: torch.nn.Module) -> None:
    ubd.set_ub_active_shape([LONG, HIDDEN])
    output = layer(random_input(kind, LONG, HIDDEN, world).requires_grad_())
    world.barrier()
    ubd.set_ub_active_shape([SHORT, HIDDEN])
    expect_raises(world, ubd.UBShapeError, [f"{LONG} tokens"], lambda: output.sum().backward())
    world.barrier()


@case()
def dim_0_that_tp_does_not_divide_is_caught(world: World) -> None:
    """[S, B, H] with S * B a multiple of tp but S not: TE floors the output silently."""
    with userbuffers(world, CAPACITY, HIDDEN):
        layer = build(ROW, OVERLAPS["default"], HIDDEN, world)
        rows = 3 if world.size == 2 else 6  # times 2 or more sequences
        batch = 2 * world.size
        ubd.set_ub_active_shape([rows * batch, HIDDEN])
        operand = torch.ones(rows, batch, HIDDEN // world.size, device=world.device, dtype=torch.bfloat16)
        with torch.no_grad():
            expect_raises(world, ubd.UBShapeError, ["dim 0", f"tp = {world.size}"], lambda: layer(operand))


@case()
def a_frozen_weight_with_bulk_wgrad_is_refused(world: World) -> None:
    """TE would return dgrad without its reduce-scatter; without bulk overlap the same layer is right."""
    bulk = OVERLAPS["default"]
    ring = OVERLAPS["dgrad_ring"]
    for name in ("te.Linear column", "te.LayerNormLinear"):
        kind = KINDS[name]
        with userbuffers(world, CAPACITY, HIDDEN, bulk):
            layer = _frozen(build(kind, bulk, HIDDEN, world))
            ubd.set_ub_active_shape([LONG, HIDDEN])
            operand = random_input(kind, LONG, HIDDEN, world)
            parts = ["frozen", "ub_bulk_wgrad=False"]
            expect_raises(world, ubd.UBUnsupportedError, parts, lambda: step(layer, operand, world))  # noqa: B023
            with torch.no_grad():
                layer(operand)  # evaluation is no hazard
        with stock_userbuffers(world, [LONG, HIDDEN], ub_cfgs=ring.ub_cfgs):
            layer = _frozen(build(kind, ring, HIDDEN, world))
            expected = step(layer, random_input(kind, LONG, HIDDEN, world), world)
        with userbuffers(world, CAPACITY, HIDDEN, ring):
            layer = _frozen(build(kind, ring, HIDDEN, world))
            ubd.set_ub_active_shape([LONG, HIDDEN])
            wrong = differing(step(layer, random_input(kind, LONG, HIDDEN, world), world), expected)
            expect(world, not wrong, f"{name} frozen, {ring.name}: {wrong}")


def _frozen(layer: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 1:
            parameter.requires_grad_(False)
        del name
    return layer


@case()
def frozen_weights_that_te_handles_follow_the_shape(world: World) -> None:
    """LayerNormMLP switches bulk overlap off by itself; the fused column takes a dgrad reduce-scatter, here a ring."""
    kinds = {"te.LayerNormMLP": "default", "te.Linear row": "default", "te.ops row": "default"}
    for name, choice in (kinds | {"te.ops column": "dgrad_ring"}).items():
        kind, overlap = KINDS[name], OVERLAPS[choice]
        with stock_userbuffers(world, [LONG, HIDDEN], ub_cfgs=overlap.ub_cfgs):
            layer = _frozen(build(kind, overlap, HIDDEN, world))
            expected = step(layer, random_input(kind, LONG, HIDDEN, world), world)
        with userbuffers(world, CAPACITY, HIDDEN, overlap):
            layer = _frozen(build(kind, overlap, HIDDEN, world))
            for tokens in (SHORT, LONG):
                ubd.set_ub_active_shape([tokens, HIDDEN])
                found = step(layer, random_input(kind, tokens, HIDDEN, world), world)
                world.barrier()
            wrong = differing(found, expected)
            expect(world, not wrong, f"{name} frozen: {wrong}")


@case()
def stock_te_is_wrong_in_a_pipelined_dgrad_and_it_is_refused(world: World) -> None:
    """BF16 dgrad with a pipelined reduce-scatter at exactly its T: no error, and a gradient that is none."""
    pipeline, ring = OVERLAPS["dgrad_pipeline"], OVERLAPS["dgrad_ring"]
    for name in ("te.Linear column", "te.LayerNormLinear", "te.LayerNormMLP"):
        kind = KINDS[name]
        plain = build(kind, ring, HIDDEN, world, on=False)
        expected = step(plain, random_input(kind, LONG, HIDDEN, world), world)["input.grad"]
        errors = {}
        for overlap in (ring, pipeline):
            found = _expected(world, kind, overlap, LONG)["input.grad"]
            errors[overlap.name] = relative_error(torch.nan_to_num(found.float()), expected)
        expect(world, errors["dgrad_ring"] < 0.03, f"{name}: the ring is {errors['dgrad_ring']:.1e} off")
        expect(world, errors["dgrad_pipeline"] > 0.1, f"{name}: the pipeline is right, {errors}; no need to refuse it?")
        note(world, f"{name}, dgrad of stock TE off the layer without overlap: {errors}")
    parts = ["qkv_dgrad", "silently wrong", "ring_exchange"]
    cfgs = dict(pipeline.ub_cfgs or {})
    expect_raises(
        world,
        ubd.UBUnsupportedError,
        parts,
        lambda: ubd.initialize_ub(
            [CAPACITY, HIDDEN], world.size, quantization_modes=quantization_modes(["none"]), ub_cfgs=cfgs, backend="te"
        ),
    )
    expect(world, not communicators(), "communicators of TE are left")
    with userbuffers(world, CAPACITY, HIDDEN):
        # a layer that asks for it on the communicator that was made for the bulk all-gather
        layer = build(KINDS["te.Linear column"], pipeline, HIDDEN, world)
        operand = random_input(KINDS["te.Linear column"], CAPACITY, HIDDEN, world)
        expect_raises(world, ubd.UBUnsupportedError, parts, lambda: step(layer, operand, world))
        operation = _frozen(build(KINDS["te.ops column"], OVERLAPS["default"], HIDDEN, world))
        parts[0] = "fc1_dgrad"
        expect_raises(world, ubd.UBUnsupportedError, parts, lambda: step(operation, operand, world))


@case()
def delayed_wgrad_over_a_live_buffer_is_refused(world: World) -> None:
    flags = {**OVERLAPS["default"].flags(), "ub_bulk_dgrad": False, "ub_bulk_wgrad": False}  # as TE itself demands
    with userbuffers(world, CAPACITY, HIDDEN):
        layer = ROW.build(HIDDEN, world, flags, delay_wgrad_compute=True)
        fill_parameters(layer, world)
        ubd.set_ub_active_shape([LONG, HIDDEN])
        operand = random_input(ROW, LONG, HIDDEN, world)
        parts = ["delay_wgrad_compute", "overwrites"]
        expect_raises(world, ubd.UBUnsupportedError, parts, lambda: step(layer, operand, world))
        world.barrier()


@case()
def a_filled_buffer_keeps_the_shape(world: World) -> None:
    """Between copy_into_buffer and the GEMM the shape must not change; the name is in the text."""
    import transformer_engine.pytorch.module.base as base

    with userbuffers(world, CAPACITY, HIDDEN):
        ubd.set_ub_active_shape([LONG, HIDDEN])
        local = random_input(KINDS["te.Linear column"], LONG, HIDDEN, world)
        held = base.fill_userbuffers_buffer_for_all_gather(base.get_ub("qkv_fprop", False), local, None, world.tp_group)
        change = lambda: ubd.set_ub_active_shape([SHORT, HIDDEN])  # noqa: E731
        expect_raises(world, ubd.UBStateError, ["qkv_fprop"], change)
        expect(world, ubd.get_ub_active_shape() == (LONG, HIDDEN), "the shape changed")
        ubd.set_ub_active_shape([LONG, HIDDEN])  # the same shape is no change
        del held
        change()
        expect(world, ubd.get_ub_active_shape() == (SHORT, HIDDEN), "the shape did not change once it was free")


@case()
def another_thread_cannot_change_the_shape_of_an_overlap_under_way(world: World) -> None:
    import transformer_engine_torch as tex

    entered, release = threading.Event(), threading.Event()
    stock = tex.generic_gemm

    def slow(*args: object, **kwargs: object) -> object:
        entered.set()
        release.wait(20)
        return stock(*args, **kwargs)

    tex.generic_gemm = slow
    try:
        with userbuffers(world, CAPACITY, HIDDEN):
            layer = build(ROW, OVERLAPS["default"], HIDDEN, world)
            ubd.set_ub_active_shape([LONG, HIDDEN])
            worker = threading.Thread(target=_output, args=(layer, world, LONG))
            worker.start()
            entered.wait(20)
            expect_raises(world, ubd.UBStateError, ["proj_fprop"], lambda: ubd.set_ub_active_shape([SHORT, HIDDEN]))
            release.set()
            worker.join(20)
            expect(world, not worker.is_alive(), "the overlap did not end")
            ubd.set_ub_active_shape([SHORT, HIDDEN])
    finally:
        release.set()
        tex.generic_gemm = stock

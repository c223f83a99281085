# SPDX-License-Identifier: Apache-2.0
"""Forward and backward apart from each other: 1F1B, recomputation, evaluation between steps, packed batches."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from unittest import mock

import torch
from harness import case, expect, userbuffers

import ub_dynamic as ubd
from ub_dynamic.packing import PackedBatch
from ub_dynamic.testing.te_layers import (
    KINDS,
    OVERLAPS,
    LayerKind,
    build,
    collect,
    differing,
    random_input,
    random_tensor,
    relative_error,
    step,
    thd_arguments,
)
from ub_dynamic.testing.te_world import World, poison, stock_userbuffers

HIDDEN, CAPACITY = 512, 1024
OVERLAP = OVERLAPS["default"]
Tensors = Mapping[str, torch.Tensor]


def _one_after_another(world: World, kind: LayerKind, layer: torch.nn.Module, lengths: list[int]) -> list[Tensors]:
    """Each microbatch alone: the reference of every schedule."""
    found = []
    for tokens in lengths:
        poison(world)
        with ubd.active_shape([tokens, HIDDEN]):
            found.append(step(layer, random_input(kind, tokens, HIDDEN, world), world))
    return found


def _forward(
    world: World, kind: LayerKind, run: Callable[[torch.Tensor], torch.Tensor], tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = random_input(kind, tokens, HIDDEN, world).requires_grad_()
    with ubd.microbatch(tokens) as microbatch:
        output = microbatch.bind_backward(run(leaf))
    return leaf, output


def _backward(
    world: World, layer: torch.nn.Module, leaf: torch.Tensor, output: torch.Tensor
) -> dict[str, torch.Tensor]:
    output.backward(random_tensor(tuple(output.shape), world, 5 * output.numel() + 3))
    return collect(layer, leaf, output)


@case()
def one_forward_one_backward(world: World) -> None:
    """Forward i + 1 runs before backward i; each backward sees its own T again."""
    lengths = [256, CAPACITY, 8 * world.size, 512]
    for name in ("te.LayerNormMLP", "te.TransformerLayer"):
        kind = KINDS[name]
        with userbuffers(world, CAPACITY, HIDDEN):
            layer = build(kind, OVERLAP, HIDDEN, world)
            expected = _one_after_another(world, kind, layer, lengths)
            world.barrier()
            pending = [_forward(world, kind, layer, lengths[0])]
            found: list[Tensors] = []
            for tokens in [*lengths[1:], None]:
                if tokens is not None:
                    pending.append(_forward(world, kind, layer, tokens))
                found.append(_backward(world, layer, *pending.pop(0)))
            for tokens, one, other in zip(lengths, found, expected, strict=True):
                wrong = differing(one, other)
                expect(world, not wrong, f"{name}, T = {tokens}: {wrong}")
            active = ubd.get_ub_active_shape()
            expect(world, active == (lengths[-1], HIDDEN), f"the last backward left {active}")


@case()
def a_view_would_break_megatron(world: World) -> None:
    """bind_backward returns the tensor itself: pipeline schedules deallocate outputs that are no view."""
    kind = KINDS["te.LayerNormMLP"]
    with userbuffers(world, CAPACITY, HIDDEN):
        layer = build(kind, OVERLAP, HIDDEN, world)
        with ubd.microbatch(256) as microbatch:
            output = layer(random_input(kind, 256, HIDDEN, world).requires_grad_())
            bound = microbatch.bind_backward(output)
        expect(world, bound is output and output._base is None, "another tensor, or a view")
        bound.sum().backward()


@case(limit_s=120)
def recomputation_sees_the_shape_of_its_microbatch(world: World) -> None:
    """TE's and torch's checkpoint, reentrant and not; another microbatch runs before the backward.

    The reference is the same checkpoint over buffers made for T: TE's switches the fusion of bias and GELU off, for
    good, where it is not reentrant, and modules do not overlap in a first pass without gradients.
    """
    tokens, other = 256, 768
    for name in ("te.LayerNormMLP", "te.LayerNormLinear", "te.Linear row"):
        kind = KINDS[name]
        with stock_userbuffers(world, [tokens, HIDDEN]):
            layer = build(kind, OVERLAP, HIDDEN, world)
            expected = {}
            for way, recompute in _ways_to_recompute(world).items():
                world.barrier()
                leaf = random_input(kind, tokens, HIDDEN, world).requires_grad_()
                expected[way] = _backward(world, layer, leaf, recompute(layer, leaf))
        with userbuffers(world, CAPACITY, HIDDEN):
            layer = build(kind, OVERLAP, HIDDEN, world)
            for way, recompute in _ways_to_recompute(world).items():
                poison(world)
                leaf, output = _forward(world, kind, functools.partial(recompute, layer), tokens)
                world.barrier()  # nothing keeps a fast rank from overtaking between two all-gathers in a row
                with ubd.active_shape([other, HIDDEN]):
                    between = step(layer, random_input(kind, other, HIDDEN, world), world)
                expect(world, bool(between), "no step between")
                world.barrier()
                wrong = differing(_backward(world, layer, leaf, output), expected[way])
                expect(world, not wrong, f"{name}, {way}: {wrong}")


def _ways_to_recompute(world: World) -> dict[str, Callable[..., torch.Tensor]]:
    import transformer_engine.pytorch as te
    from torch.utils.checkpoint import checkpoint

    return {
        "te, reentrant": functools.partial(te.checkpoint, use_reentrant=True, tp_group=world.tp_group),
        "te, not reentrant": functools.partial(te.checkpoint, use_reentrant=False),
        "torch, reentrant": functools.partial(checkpoint, use_reentrant=True),
        "torch, not reentrant": functools.partial(checkpoint, use_reentrant=False),
    }


@case()
def evaluation_between_training_steps(world: World) -> None:
    """no_grad runs overlap too (te.Linear row): inside active_shape they are right and disturb nothing."""
    for name in ("te.Linear row", "te.LayerNormMLP", "te.TransformerLayer"):
        kind = KINDS[name]
        with userbuffers(world, CAPACITY, HIDDEN):
            layer = build(kind, OVERLAP, HIDDEN, world)
            first, second = _one_after_another(world, kind, layer, [256, 512])
            world.barrier()
            with ubd.active_shape([512, HIDDEN]), torch.no_grad():
                quiet = layer(random_input(kind, 512, HIDDEN, world))
            error = relative_error(quiet, second["output"])
            expect(world, error < 0.03, f"{name}: evaluation is {error:.1e} off the training forward")
            if name == "te.Linear row":
                expect(world, torch.equal(quiet, second["output"]), "the same overlap, other bits")
            world.barrier()
            leaf, output = _forward(world, kind, layer, 256)
            world.barrier()
            with ubd.active_shape([512, HIDDEN]), torch.no_grad():
                again = layer(random_input(kind, 512, HIDDEN, world))
            expect(world, torch.equal(again, quiet), f"{name}: evaluation differs between forward and backward")
            world.barrier()
            wrong = differing(_backward(world, layer, leaf, output), first)
            expect(world, not wrong, f"{name}: {wrong}")


@case(limit_s=120)
def return_layernorm_output_follows_the_shape(world: World) -> None:
    """LoRA adapters read the normalised input; TE switches the all-gather overlap off there, the rest stays.

    Bits are compared with buffers made for T, gradients into both outputs. Of a gathered second output LayerNormMLP
    with bulk overlap drops the gradient, on any buffers (``fc1_dgrad = ub_obj_fc1_wgrad.get_buffer``), and no
    LayerNormLinear uses it: there the layer without overlap is compared with a gradient into the first output alone.
    """
    lengths = (256, CAPACITY, 16 * world.size)
    for name in ("te.LayerNormLinear", "te.LayerNormMLP"):
        kind = KINDS[name]
        for gathered in (False, True):
            flags = {"return_layernorm_output": True, "return_layernorm_output_gathered": gathered}
            plain = build(kind, OVERLAP, HIDDEN, world, on=False, **flags)
            found = {}
            with userbuffers(world, CAPACITY, HIDDEN):
                layer = build(kind, OVERLAP, HIDDEN, world, **flags)
                for tokens in lengths:
                    poison(world)
                    ubd.set_ub_active_shape([tokens, HIDDEN])
                    operand = random_input(kind, tokens, HIDDEN, world)
                    found[tokens] = _two_outputs(world, layer, operand)
                    ours, theirs = (_two_outputs(world, each, operand, not gathered) for each in (layer, plain))
                    for part, value in theirs.items():
                        error = relative_error(ours[part], value)
                        where = f"{name}, gathered {gathered}, T = {tokens}, {part}"
                        expect(world, error < 0.03, f"{where}: {error:.1e} off the layer without overlap")
            for tokens in lengths:
                with stock_userbuffers(world, [tokens, HIDDEN]):
                    wrong = differing(
                        found[tokens], _two_outputs(world, layer, random_input(kind, tokens, HIDDEN, world))
                    )
                expect(world, not wrong, f"{name}, gathered {gathered}, T = {tokens}: {wrong}")


def _two_outputs(
    world: World, layer: torch.nn.Module, operand: torch.Tensor, both: bool = True
) -> dict[str, torch.Tensor]:
    leaf = operand.clone().requires_grad_()
    output, normalised = layer(leaf)
    outputs, grads = [output], [random_tensor(tuple(output.shape), world, 11)]
    if both:
        outputs, grads = [output, normalised], [*grads, torch.ones_like(normalised)]
    torch.autograd.backward(outputs, grads)
    return {**collect(layer, leaf, output), "layernorm_output": normalised.detach()}


@case()
def a_packed_batch_through_a_transformer_layer(world: World) -> None:
    """THD: lengths in, PackedBatch, TransformerLayer; T changes, and equals the layer without overlap."""
    kind = KINDS["te.TransformerLayer"]
    thd = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal"}
    packings = ([700, 300], [17, 230, 64], [CAPACITY], [5], [128] * 6)
    # cuDNN has no deterministic backward for some lengths
    nondeterministic = mock.patch.dict(os.environ, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"})
    with nondeterministic, userbuffers(world, CAPACITY, HIDDEN):
        layer = build(kind, OVERLAP, HIDDEN, world, **thd)
        plain = build(kind, OVERLAP, HIDDEN, world, on=False, **thd)
        for lengths in packings:
            batch = PackedBatch.from_lengths(lengths, tp=world.size, capacity=CAPACITY)
            arguments = thd_arguments(layer, batch, world.device)
            rows = batch.total_tokens // world.size
            operand = random_tensor((rows, HIDDEN), world, sum(lengths))
            with ubd.microbatch(batch) as microbatch:
                leaf = operand.clone().requires_grad_()
                output = microbatch.bind_backward(layer(leaf, **arguments))
            grad = random_tensor(tuple(output.shape), world, 13)
            output.backward(grad)
            found = collect(layer, leaf, output)
            leaf = operand.clone().requires_grad_()
            output = plain(leaf, **arguments)
            output.backward(grad)
            for name, value in collect(plain, leaf, output).items():
                error = relative_error(found[name], value)
                expect(world, error < 0.03, f"{lengths}, {name}: {error:.1e} off the layer without overlap")

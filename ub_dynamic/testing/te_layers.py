# SPDX-License-Identifier: Apache-2.0
"""TE's layers with tensor-parallel overlap, as cases: how each is built, what it takes, one step of it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..packing import PackedBatch
from .te_world import World


@dataclass(frozen=True)
class Overlap:
    """One choice of overlap methods: ``ub_cfgs`` for ``initialize_ub``, and whether dgrad reduce-scatters.

    ``fp8_only``: TE computes it right with FP8 weights alone (:mod:`ub_dynamic.backends.te.hazards`).
    """

    name: str
    methods: tuple[str, ...]
    ub_cfgs: Mapping[str, Mapping[str, Any]] | None = None
    dgrad_rs: bool = False
    fp8_only: bool = False

    @property
    def mode(self) -> str:
        """The quantization mode of a run that is about something else."""
        return "fp8" if self.fp8_only else "none"

    def flags(self, on: bool = True) -> dict[str, bool]:
        """The ``ub_*`` flags of TE's layers."""
        bulk = on and not self.dgrad_rs
        return {
            "ub_overlap_ag": on,
            "ub_overlap_rs": on,
            "ub_overlap_rs_dgrad": on and self.dgrad_rs,
            "ub_bulk_dgrad": bulk,
            "ub_bulk_wgrad": bulk,
        }


_RING = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False}
_RING_NAMES = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")

OVERLAPS: dict[str, Overlap] = {
    overlap.name: overlap
    for overlap in (
        Overlap("default", ("ring AG", "pipeline RS", "bulk AG", "bulk RS")),
        Overlap(
            "ring_rs",
            ("ring AG, aggregate", "ring RS", "bulk AG", "bulk RS"),
            {
                **{name: {**_RING, "aggregate": True} for name in _RING_NAMES},
                **{name: dict(_RING) for name in ("proj_fprop", "fc2_fprop")},
            },
        ),
        Overlap(
            "dgrad_ring",
            ("ring AG", "pipeline RS", "DGRAD+RS, ring"),
            {name: dict(_RING) for name in ("qkv_dgrad", "fc1_dgrad")},
            dgrad_rs=True,
        ),
        Overlap(
            "dgrad_pipeline",
            ("ring AG", "pipeline RS", "DGRAD+RS, pipeline"),
            {name: {"method": "pipeline"} for name in ("qkv_dgrad", "fc1_dgrad")},
            dgrad_rs=True,
            fp8_only=True,
        ),
    )
}


@dataclass(frozen=True)
class LayerKind:
    """``build(hidden, world, flags)`` makes the layer; ``row_input``: it takes ``[T, H/tp]`` instead of
    ``[T/tp, H]``; ``rank3``: with a batch dimension of 1 between. ``column``: it has a column-parallel
    backward.
    """

    name: str
    build: Callable[[int, World, Mapping[str, bool]], torch.nn.Module]
    row_input: bool = False
    rank3: bool = False
    column: bool = True

    def input_shape(self, tokens: int, hidden: int, tp: int) -> tuple[int, ...]:
        if self.row_input:
            return tokens, hidden // tp
        return (tokens // tp, 1, hidden) if self.rank3 else (tokens // tp, hidden)


def _common(world: World) -> dict[str, Any]:
    return {"params_dtype": torch.bfloat16, "device": world.device, "sequence_parallel": True}


def _linear_column(hidden: int, world: World, flags: Mapping[str, bool], **more: Any) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    return te.Linear(
        hidden,
        3 * hidden,
        parallel_mode="column",
        tp_group=world.tp_group,
        ub_name="qkv",
        **flags,
        **_common(world),
        **more,
    )


def _linear_row(hidden: int, world: World, flags: Mapping[str, bool], **more: Any) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    return te.Linear(
        hidden,
        hidden,
        parallel_mode="row",
        tp_group=world.tp_group,
        ub_name="proj",
        **flags,
        **_common(world),
        **more,
    )


def _layernorm_linear(hidden: int, world: World, flags: Mapping[str, bool], **more: Any) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    return te.LayerNormLinear(
        hidden,
        3 * hidden,
        parallel_mode="column",
        tp_group=world.tp_group,
        ub_name="qkv",
        **flags,
        **_common(world),
        **more,
    )


def layernorm_mlp(hidden: int, world: World, flags: Mapping[str, bool], **more: Any) -> torch.nn.Module:
    """``te.LayerNormMLP(H, 4H)``: both linears of a block, the layer of most measurements."""
    import transformer_engine.pytorch as te

    return te.LayerNormMLP(
        hidden, 4 * hidden, set_parallel_mode=True, tp_group=world.tp_group, **flags, **_common(world), **more
    )


def attention_heads(hidden: int) -> int:
    """Of a ``te.TransformerLayer``."""
    return max(8, hidden // 64)


def transformer_layer(hidden: int, world: World, flags: Mapping[str, bool], **more: Any) -> torch.nn.Module:
    """``te.TransformerLayer`` without dropout; ``flags`` as for the other layers."""
    import transformer_engine.pytorch as te

    chosen: dict[str, Any] = {
        "num_attention_heads": attention_heads(hidden),
        "ffn_hidden_size": 4 * hidden,
        **more,
    }
    return te.TransformerLayer(
        hidden,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        set_parallel_mode=True,
        tp_group=world.tp_group,
        ub_tp_comm_overlap=any(flags.values()),
        **flags,
        **_common(world),
        **chosen,
    )


def _ops_column(hidden: int, world: World, flags: Mapping[str, bool]) -> torch.nn.Module:
    import transformer_engine.pytorch.ops as ops

    where = {"device": world.device, "dtype": torch.bfloat16}
    linear = ops.BasicLinear(
        hidden,
        3 * hidden,
        tensor_parallel_mode="column",
        tensor_parallel_group=world.tp_group,
        sequence_parallel=True,
        userbuffers_options={"comm_name": "fc1"} if any(flags.values()) else None,
        **where,
    )
    bias = ops.Bias(3 * hidden, tensor_parallel=True, tensor_parallel_group=world.tp_group, **where)
    return ops.Sequential(linear, bias)


def _ops_row(hidden: int, world: World, flags: Mapping[str, bool]) -> torch.nn.Module:
    import transformer_engine.pytorch.ops as ops

    linear = ops.BasicLinear(
        hidden // world.size,
        hidden,
        userbuffers_options={"comm_name": "fc2"} if any(flags.values()) else None,
        device=world.device,
        dtype=torch.bfloat16,
    )
    return ops.Sequential(linear, ops.ReduceScatter(world.tp_group))


KINDS: dict[str, LayerKind] = {
    kind.name: kind
    for kind in (
        LayerKind("te.Linear column", _linear_column),
        LayerKind("te.Linear row", _linear_row, row_input=True, column=False),
        LayerKind("te.LayerNormLinear", _layernorm_linear),
        LayerKind("te.LayerNormMLP", layernorm_mlp),
        LayerKind("te.TransformerLayer", transformer_layer, rank3=True),
        LayerKind("te.ops column", _ops_column),
        LayerKind("te.ops row", _ops_row, row_input=True, column=False),
    )
}


def build(
    kind: LayerKind, overlap: Overlap, hidden: int, world: World, on: bool = True, **more: Any
) -> torch.nn.Module:
    """The layer with parameters that depend on the rank and the parameter alone, so that two builds are
    equal.
    """
    layer = (
        kind.build(hidden, world, overlap.flags(on), **more) if more else kind.build(hidden, world, overlap.flags(on))
    )
    fill_parameters(layer, world)
    return layer


def fill_parameters(layer: torch.nn.Module, world: World) -> None:
    """Equal on all ranks for vectors (norms, biases), different for matrices (shards)."""
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            seed = 1000 + index + (100_000 * (world.rank + 1) if parameter.dim() > 1 else 0)
            generator = torch.Generator(world.device).manual_seed(seed)
            scale = 0.02 if parameter.dim() > 1 else 0.1
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, device=world.device) * scale
                + (1.0 if parameter.dim() == 1 and index % 2 == 0 else 0.0)
            )


def random_input(kind: LayerKind, tokens: int, hidden: int, world: World, seed: int = 0) -> torch.Tensor:
    """This rank's operand at ``tokens``, in bfloat16."""
    return random_tensor(kind.input_shape(tokens, hidden, world.size), world, 7 * tokens + 1_000_003 * seed + 1)


def random_tensor(shape: tuple[int, ...], world: World, seed: int) -> torch.Tensor:
    generator = torch.Generator(world.device).manual_seed(64 * seed + world.rank)
    return torch.randn(shape, generator=generator, device=world.device, dtype=torch.bfloat16)


def thd_arguments(layer: torch.nn.Module, batch: PackedBatch, device: torch.device) -> dict[str, Any]:
    """What the forward of a ``te.TransformerLayer`` with THD attention takes beside the tokens of ``batch``."""
    known = inspect.signature(layer.forward).parameters
    return {name: value for name, value in batch.dpa_kwargs(device).items() if name in known}


def recipe_of(name: str) -> Any:
    """TE's quantization recipe, or None for ``"bf16"``."""
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
    return recipe.Float8CurrentScaling() if name == "current" else None


def autocast(recipe: Any, world: World) -> contextlib.AbstractContextManager[Any]:
    """TE's autocast for ``recipe``; nothing for None."""
    if recipe is None:
        return contextlib.nullcontext()
    import transformer_engine.pytorch as te

    return te.autocast(enabled=True, recipe=recipe, amax_reduction_group=world.tp_group)


def step(
    layer: torch.nn.Module, operand: torch.Tensor, world: World, recipe: Any = None, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Forward and backward once: the output, the gradient of the input, and that of every parameter."""
    leaf = operand.detach().clone().requires_grad_()
    # With p = 0, too, torch's scripted dropout, which TE used before 2.20, zeroes one of some 30 million elements.
    torch.manual_seed(0)
    with autocast(recipe, world):
        output = layer(leaf, **arguments)
    output.backward(random_tensor(tuple(output.shape), world, 5 * output.numel() + 3))
    return collect(layer, leaf, output)


def collect(layer: torch.nn.Module, leaf: torch.Tensor, output: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients by name; the layer's gradients are taken away."""
    found = {"output": output.detach()}
    if leaf.grad is not None:
        found["input.grad"] = leaf.grad
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad
            parameter.grad = None
    return found


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Tensors that are not bitwise equal, with their relative error; NaN anywhere counts as different."""
    wrong = {name: float("inf") for name in found.keys() ^ expected.keys()}
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            wrong[name] = float("inf")
        elif not torch.equal(one, other):  # NaN is not equal to itself
            wrong[name] = relative_error(one, other)
    return wrong


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``expected``."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def outside_tolerance(found: torch.Tensor, expected: torch.Tensor, fp8: bool, fused: bool = False) -> bool:
    """TE's own check of a layer against its reference, failed.

    A module: at the largest difference, both bounds are passed; ``rtol`` 0.025, ``atol`` 0.00125, and 0.125, 0.0625
    with FP8 (TE's ``run_layer_with_overlap.py``). A fused operation: any element is further off than both together;
    0.016, 1e-5, and 0.125, 0.0675 with FP8 (TE's ``test_fusible_ops_with_userbuffers.py``).
    """
    found, expected = found.float(), expected.float()
    if fused:
        rtol, atol = (0.125, 0.0675) if fp8 else (0.016, 1e-5)
        return not torch.allclose(found, expected, rtol=rtol, atol=atol)
    rtol, atol = (0.125, 0.0625) if fp8 else (0.025, 0.00125)
    difference = (found - expected).abs().flatten()
    worst = int(difference.argmax())
    absolute = float(difference[worst])
    relative = absolute / max(abs(float(expected.flatten()[worst])), 1e-5)
    return not absolute <= atol and not relative <= rtol

# SPDX-License-Identifier: Apache-2.0
"""TE's own layers around the guard and auto mode: every operand is seen, before anything is enqueued."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.utils as utils
from cpu_te import CAPACITY, HIDDEN, layer, operand, te_world
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from ub_dynamic.errors import UBShapeError, UBUnsupportedError

# kind, name, flags, methods of single communicators, overlaps of one forward and backward, in order
CASES = {
    "column, bulk": (
        "linear", "qkv", {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}, {},
        ["qkv_fprop ag", "qkv_dgrad bulk ag", "qkv_wgrad bulk rs"],
    ),
    "column, bulk dgrad alone": (
        "linear", "qkv", {"ub_bulk_dgrad": True}, {}, ["qkv_dgrad bulk ag"],
    ),
    "column, dgrad + rs": (
        "linear", "qkv", {"ub_overlap_ag": True, "ub_overlap_rs_dgrad": True}, {"qkv_dgrad": "ring_exchange"},
        ["qkv_fprop ag", "qkv_dgrad rs"],
    ),
    "row, pipeline": (
        "linear", "proj", {"ub_overlap_ag": True, "ub_overlap_rs": True}, {}, ["proj_fprop rs", "proj_dgrad ag"],
    ),
    "row, ring": (
        "linear", "proj", {"ub_overlap_ag": True, "ub_overlap_rs": True}, {"proj_fprop": "ring_exchange"},
        ["proj_fprop rs", "proj_dgrad ag"],
    ),
    "layernorm, bulk": (
        "layernorm", "qkv", {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}, {},
        ["qkv_fprop ag", "qkv_dgrad bulk ag", "qkv_wgrad bulk rs"],
    ),
    "mlp": (
        "mlp", "fc1",
        {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}, {},
        ["fc1_fprop ag", "fc2_fprop rs", "fc2_dgrad ag", "fc1_dgrad bulk ag", "fc1_wgrad bulk rs"],
    ),
}  # fmt: skip


def build(case: str) -> torch.nn.Module:
    kind, name, flags, _, _ = CASES[case]
    return layer(kind, name, **flags)


@pytest.mark.parametrize("case", CASES)
def test_guard_passes_what_fits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, methods, expected = CASES[case]
    with te_world(monkeypatch, **methods) as world:
        module = build(case)
        for tokens in (CAPACITY, 64, 192):
            world.calls.clear()
            world.manager.set_active_shape([tokens, HIDDEN])
            module(operand(module, tokens)).sum().backward()
            assert [f"{call.name} {call.kind}" for call in world.overlaps()] == expected
            assert {(call.tokens, call.active) for call in world.overlaps()} == {(tokens, tokens)}
            assert world.backend.busy() is None
        assert sum(world.backend.guard.runs.values()) == 3 * len(expected)


@pytest.mark.parametrize("case", CASES)
def test_guard_refuses_a_forward_of_another_size(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, methods, expected = CASES[case]
    if not any("fprop" in name for name in expected):
        pytest.skip("no overlap in the forward")
    with te_world(monkeypatch, **methods) as world:
        module = build(case)
        for active, tokens in ((64, 128), (128, 64)):
            world.manager.set_active_shape([active, HIDDEN])
            with pytest.raises(UBShapeError, match=f"has {tokens} tokens, the active shape is {active}") as caught:
                module(operand(module, tokens))
            assert expected[0].split()[0] in str(caught.value)
            assert f"set_ub_active_shape([{tokens}, {HIDDEN}])" in str(caught.value)
            assert world.overlaps() == []
            assert world.manager.active == (active, HIDDEN)
        world.manager.set_active_shape([64, HIDDEN])
        module(operand(module, 64)).sum().backward()  # nothing was left behind


@pytest.mark.parametrize("case", CASES)
def test_guard_refuses_a_backward_at_another_shape(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, methods, expected = CASES[case]
    backward = [name for name in expected if "fprop" not in name]
    with te_world(monkeypatch, **methods) as world:
        module = build(case)
        world.manager.set_active_shape([128, HIDDEN])
        output = module(operand(module, 128))
        world.manager.set_active_shape([64, HIDDEN])
        done = len(world.overlaps())
        with pytest.raises(UBShapeError, match=f"{backward[0].split()[0]}.* has 128 tokens"):
            output.sum().backward()
        assert len(world.overlaps()) == done


@pytest.mark.parametrize("case", CASES)
def test_auto_needs_no_call(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, methods, expected = CASES[case]
    with te_world(monkeypatch, auto=True, **methods) as world:
        module = build(case)
        sizes = (64, CAPACITY, 128)
        outputs = [module(operand(module, tokens)) for tokens in sizes]
        for output in outputs:  # forwards and backwards of different T, interleaved
            output.sum().backward()
        calls = world.overlaps()
        assert len(calls) == len(sizes) * len(expected)
        assert all(call.tokens == call.active for call in calls)
        assert {call.tokens for call in calls} == set(sizes)
        assert world.manager.active == (128, HIDDEN)


def test_auto_with_bulk_wgrad_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # TE takes the wgrad buffer before anything names T.
    with te_world(monkeypatch, auto=True) as world:
        module = layer("linear", "qkv", ub_bulk_wgrad=True, ub_overlap_ag=True)
        first, second = operand(module, 64), operand(module, 128)
        outputs = module(first), module(second)
        for output in outputs:
            output.sum().backward()
        assert [call.tokens for call in world.overlaps()] == [64, 128, 64, 128]
        assert all(call.tokens == call.active for call in world.overlaps())
        assert [tuple(x.grad.shape) for x in (first, second)] == [(32, HIDDEN), (64, HIDDEN)]


def test_guard_with_bulk_wgrad_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        module = layer("linear", "qkv", ub_bulk_wgrad=True)
        world.manager.set_active_shape([64, HIDDEN])
        output = module(operand(module, 64))
        world.manager.set_active_shape([128, HIDDEN])
        with pytest.raises(UBShapeError, match="qkv_wgrad: the microbatch has 64 tokens"):
            output.sum().backward()


@pytest.mark.parametrize("kind", ["linear", "layernorm"])
def test_a_frozen_weight_with_bulk_wgrad_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        module = layer(kind, "qkv", ub_overlap_ag=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True)
        module.requires_grad_(False)
        with pytest.raises(UBUnsupportedError, match="frozen weight and ub_bulk_wgrad.*ub_bulk_wgrad=False"):
            module(operand(module, CAPACITY))
        assert world.calls == []
        with torch.no_grad():
            module(operand(module, CAPACITY))  # no backward, no harm
        module.weight.requires_grad_(True)
        module(operand(module, CAPACITY)).sum().backward()


def test_a_frozen_weight_is_refused_where_dgrad_serves_the_norm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        module = layer("layernorm", "qkv", ub_overlap_ag=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True)
        module.weight.requires_grad_(False)
        with pytest.raises(UBUnsupportedError, match="frozen weight and ub_bulk_wgrad"):
            module(operand(module, CAPACITY).detach())  # frozen embeddings: only the norm's weight is trained
        assert world.calls == []
        module.requires_grad_(False)
        module(operand(module, CAPACITY).detach())  # nothing asks for dgrad


@pytest.mark.parametrize(
    ("name", "flags"),
    [("qkv", {"ub_bulk_dgrad": True}), ("qkv", {"ub_bulk_dgrad": True, "ub_bulk_wgrad": True}),
     ("proj", {"ub_overlap_ag": True})],
)  # fmt: skip
def test_an_input_without_a_gradient_is_refused_where_dgrad_gathers(
    name: str, flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with te_world(monkeypatch) as world:
        module = layer("linear", name, **flags)
        data = operand(module, CAPACITY).detach()
        with pytest.raises(UBUnsupportedError, match=rf"{name}.*an input that needs no gradient.*requires_grad_\(\)"):
            module(data)
        assert world.calls == []
        with torch.no_grad():
            module(data)
        module(data.requires_grad_()).sum().backward()
        module.requires_grad_(False)
        module(data.detach())  # no backward at all


def test_an_input_without_a_gradient_where_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        for kind, name, flags in (
            ("linear", "qkv", {"ub_overlap_ag": True}),
            ("layernorm", "qkv", {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}),
        ):
            module = layer(kind, name, **flags)
            world.manager.set_active_shape([64, HIDDEN])
            module(operand(module, 64).detach()).sum().backward()


@pytest.mark.parametrize(("kind", "name"), [("linear", "qkv"), ("layernorm", "qkv"), ("mlp", "fc1")])
@pytest.mark.parametrize("method", ["pipeline", "bulk"])
def test_a_pipelined_dgrad_is_refused(kind: str, name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # ub_overlap_rs_dgrad takes whatever communicator there is, the bulk one too
    with te_world(monkeypatch, **{f"{name}_dgrad": method}) as world:
        module = layer(kind, name, ub_overlap_ag=True, ub_overlap_rs_dgrad=True)
        with pytest.raises(UBUnsupportedError, match=f"{name}_dgrad with a pipelined.*silently wrong.*ring_exchange"):
            module(operand(module, CAPACITY))
        assert world.calls == []
        with torch.no_grad():
            module(operand(module, CAPACITY))


@pytest.mark.parametrize(("override", "refused"), [(None, True), ("high_precision", False)])
@pytest.mark.parametrize(
    ("kind", "name", "flags"),
    [("layernorm", "qkv", {"ub_bulk_wgrad": True}), ("linear", "proj", {"ub_overlap_ag": True}),
     ("linear", "fc1", {"ub_overlap_rs_dgrad": True})],
)  # fmt: skip
def test_a_recipe_whose_backward_overlaps_nothing(
    kind: str, name: str, flags: dict[str, bool], override: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (te.Linear, te.LayerNormLinear):  # FP8 needs a device
        monkeypatch.setattr(module, "forward", lambda self, inp, *args, **kwargs: inp)
    monkeypatch.setattr(utils, "get_device_compute_capability", lambda: (10, 0))
    with te_world(monkeypatch, modes=("fp8",)):
        built = layer(kind, name, **flags)
        x = operand(built, CAPACITY)
        if kind == "layernorm":
            built.weight.requires_grad_(False)
        elif name == "proj":
            x = x.detach()
        monkeypatch.setattr(FP8GlobalStateManager, "is_fp8_enabled", lambda: True)
        recipe = SimpleNamespace(backward_override=override)
        monkeypatch.setattr(FP8GlobalStateManager, "get_fp8_recipe", lambda: recipe)
        with pytest.raises(UBUnsupportedError) if refused else contextlib.nullcontext():
            built(x)


def test_delayed_wgrad_on_a_buffer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch):
        module = layer("linear", "proj", ub_overlap_ag=True, ub_overlap_rs=True, delay_wgrad_compute=True)
        with pytest.raises(UBUnsupportedError, match="delay_wgrad_compute stores an operand that is a view"):
            module(operand(module, CAPACITY)).sum().backward()


def test_delayed_wgrad_on_its_own_tensors_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch):
        module = layer("linear", "qkv", ub_overlap_ag=True, delay_wgrad_compute=True)
        module(operand(module, CAPACITY)).sum().backward()
        module.backward_dw()
        assert module.weight.grad is not None


def test_an_exception_in_the_middle_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine_torch as tex

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    with te_world(monkeypatch) as world:
        module = build("column, bulk")
        recorded = tex.generic_gemm
        tex.generic_gemm = out_of_memory
        try:
            with pytest.raises(RuntimeError, match="out of memory"):
                module(operand(module, CAPACITY))
        finally:
            tex.generic_gemm = recorded
        world.manager.set_active_shape([64, HIDDEN])
        module(operand(module, 64)).sum().backward()

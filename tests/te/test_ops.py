# SPDX-License-Identifier: Apache-2.0
"""TE's fused linear operations around the guard and auto mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch.ops.fused.userbuffers_backward_linear as backward_linear
import transformer_engine.pytorch.ops.fused.userbuffers_forward_linear as forward_linear
from cpu_te import CAPACITY, HIDDEN, TP, World, te_world

from ub_dynamic.errors import UBShapeError, UBUnsupportedError

OUT = 2 * HIDDEN // TP


class _HostTorch:
    """``torch`` for a module that allocates on a CUDA device by name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(size: Any, *, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (forward_linear, backward_linear):
        monkeypatch.setattr(module, "torch", _HostTorch())


SHARED: dict[str, Any] = {
    "device": torch.device("cuda"),
    "dtype": torch.bfloat16,
    "tensor_parallel_group": object(),
    "tensor_parallel_size": TP,
    "sequence_parallel": True,
}
WEIGHT = {"column": (OUT, HIDDEN), "row": (HIDDEN, OUT)}
NAME = {"column": "qkv", "row": "proj"}


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def forward(mode: str, tokens: int) -> torch.Tensor:
    x = tensor(tokens // TP, HIDDEN) if mode == "column" else tensor(tokens, OUT)
    output, _ = forward_linear.UserbuffersForwardLinear._functional_forward(
        x, tensor(*WEIGHT[mode]), tensor_parallel_mode=mode, ub_comm_name=NAME[mode], **SHARED
    )
    return output


def backward(mode: str, tokens: int, frozen: bool = False) -> Any:
    x = tensor(tokens // TP, HIDDEN) if mode == "column" else tensor(tokens, OUT)
    grad = tensor(tokens, OUT) if mode == "column" else tensor(tokens // TP, HIDDEN)
    return backward_linear.UserbuffersBackwardLinear._functional_backward(
        grad, x, tensor(*WEIGHT[mode]), weight_requires_grad=not frozen, tensor_parallel_mode=mode,
        ub_comm_name=NAME[mode], **SHARED,
    )  # fmt: skip


BACKWARD = {
    ("column", False): ["qkv_dgrad bulk ag", "qkv_wgrad bulk rs"],
    ("row", False): ["proj_dgrad ag"],
    ("row", True): ["proj_dgrad ag"],
}
FORWARD = {"column": ["qkv_fprop ag"], "row": ["proj_fprop rs"]}


def ran(world: World) -> list[str]:
    names = [f"{call.name} {call.kind}" for call in world.overlaps()]
    assert all(call.tokens == call.active for call in world.overlaps())
    world.calls.clear()
    return names


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize(("mode", "frozen"), BACKWARD)
def test_any_valid_size(mode: str, frozen: bool, auto: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch, auto=auto) as world:
        for tokens in (CAPACITY, 64, 128):
            if not auto:
                world.manager.set_active_shape([tokens, HIDDEN])
            assert forward(mode, tokens).shape[0] == (tokens if mode == "column" else tokens // TP)
            assert ran(world) == FORWARD[mode]
            dgrad, *_ = backward(mode, tokens, frozen)
            assert dgrad.shape == ((tokens // TP, HIDDEN) if mode == "column" else (tokens, OUT))
            assert ran(world) == BACKWARD[mode, frozen]
            assert world.manager.active == (tokens, HIDDEN)


@pytest.mark.parametrize(("mode", "frozen"), BACKWARD)
def test_other_sizes_are_refused(mode: str, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        for active, tokens in ((64, 128), (128, 64)):
            world.manager.set_active_shape([active, HIDDEN])
            for run in (lambda t=tokens: forward(mode, t), lambda t=tokens: backward(mode, t, frozen)):
                with pytest.raises(UBShapeError, match=f"has {tokens} tokens, the active shape is {active}"):
                    run()
            assert world.overlaps() == []


def test_a_frozen_weight_is_refused_where_its_dgrad_is_pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    # TE takes the communicator of the bulk all-gather for a reduce-scatter then
    with te_world(monkeypatch) as world:
        forward("column", CAPACITY)
        world.calls.clear()
        with pytest.raises(UBUnsupportedError, match="qkv_dgrad with a pipelined reduce-scatter.*silently wrong"):
            backward("column", CAPACITY, frozen=True)
        assert world.calls == []


def test_a_frozen_weight_over_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch, qkv_dgrad="ring_exchange") as world:
        for tokens in (CAPACITY, 64):
            world.manager.set_active_shape([tokens, HIDDEN])
            dgrad, *_ = backward("column", tokens, frozen=True)
            assert dgrad.shape == (tokens // TP, HIDDEN)
            assert ran(world) == ["qkv_dgrad rs"]

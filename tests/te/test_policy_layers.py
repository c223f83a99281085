# SPDX-License-Identifier: Apache-2.0
"""TE's layers overlap as the policy chooses at each T."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fakes
import policy_te
import pytest
import torch
import transformer_engine.pytorch as te
from cpu_te import CAPACITY, HIDDEN, layer, operand
from policy_te import (
    AGGREGATE,
    BULK,
    COLUMN,
    EVERYTHING,
    FLAGS,
    NONE,
    PIPELINE,
    RING,
    ROW,
    World,
    installed,
    stages,
    switch,
    te_world,
)

from ub_dynamic.bench.arms import use_arm
from ub_dynamic.bench.te_steps import TESteps
from ub_dynamic.errors import UBShapeError, UBStateError, UBUnsupportedError
from ub_dynamic.manager import Manager
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.testing.te_layers import KINDS

# layer kind, ub_name, flags it is built with, choices, overlaps of one forward and backward in order
LAYERS_AT = {
    "column as configured": ("linear", "qkv", COLUMN, {}, ["qkv_fprop ag", "qkv_dgrad bulk ag", "qkv_wgrad bulk rs"]),
    "column, none": ("linear", "qkv", COLUMN, {"qkv_fprop": NONE, "qkv_dgrad": NONE}, []),
    "column, none forward": (
        "linear", "qkv", COLUMN, {"qkv_fprop": NONE}, ["qkv_dgrad bulk ag", "qkv_wgrad bulk rs"]),
    "column, none backward": ("linear", "qkv", COLUMN, {"qkv_dgrad": NONE}, ["qkv_fprop ag"]),
    "column, ring backward": (
        "linear", "qkv", COLUMN, {"qkv_dgrad": RING}, ["qkv_fprop ag", "qkv_dgrad (ring_exchange) rs"]),
    "column, bulk from ring": (
        "linear", "qkv", {"ub_overlap_ag": True, "ub_overlap_rs_dgrad": True}, {"qkv_dgrad": BULK},
        ["qkv_fprop ag", "qkv_dgrad bulk ag", "qkv_wgrad bulk rs"]),
    "column, other layers' choices": (
        "linear", "qkv", COLUMN, {"fc1_fprop": NONE, "fc1_dgrad": RING, "proj_dgrad": NONE},
        ["qkv_fprop ag", "qkv_dgrad bulk ag", "qkv_wgrad bulk rs"]),
    "layernorm, ring backward": (
        "layernorm", "qkv", COLUMN, {"qkv_fprop": AGGREGATE, "qkv_dgrad": RING},
        ["qkv_fprop ag", "qkv_dgrad (ring_exchange) rs"]),
    "layernorm, none": ("layernorm", "qkv", COLUMN, {"qkv_fprop": NONE, "qkv_dgrad": NONE}, []),
    "row, ring": (
        "linear", "proj", ROW, {"proj_fprop": RING}, ["proj_fprop (ring_exchange) rs", "proj_dgrad ag"]),
    "row, pipeline, none backward": (
        "linear", "proj", ROW, {"proj_fprop": PIPELINE, "proj_dgrad": NONE}, ["proj_fprop rs"]),
    "row, none": ("linear", "proj", ROW, {"proj_fprop": NONE, "proj_dgrad": NONE}, []),
    "mlp as configured": (
        "mlp", "fc1", FLAGS, {},
        ["fc1_fprop ag", "fc2_fprop rs", "fc2_dgrad ag", "fc1_dgrad bulk ag", "fc1_wgrad bulk rs"]),
    "mlp, rings": (
        "mlp", "fc1", FLAGS, {"fc2_fprop": RING, "fc1_dgrad": RING},
        ["fc1_fprop ag", "fc2_fprop (ring_exchange) rs", "fc2_dgrad ag", "fc1_dgrad (ring_exchange) rs"]),
    "mlp, none": (
        "mlp", "fc1", FLAGS, {"fc1_fprop": NONE, "fc2_dgrad": NONE, "fc2_fprop": NONE, "fc1_dgrad": NONE}, []),
    "mlp, one of two": (  # what the note says
        "mlp", "fc1", FLAGS, {"fc2_dgrad": NONE, "fc2_fprop": NONE, "fc1_dgrad": NONE},
        ["fc1_fprop ag", "fc2_dgrad ag"]),
    "built without": ("linear", "proj", {}, {"proj_fprop": RING, "proj_dgrad": RING}, []),
}  # fmt: skip


class TestLayers:
    @pytest.mark.parametrize("case", LAYERS_AT)
    def test_overlaps_at_a_choice(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kind, name, built, choices, expected = LAYERS_AT[case]
        with te_world(monkeypatch, EVERYTHING) as world:
            module = layer(kind, name, **built)
            before = dict(vars(module))
            for plan in (choices, {}, choices):
                world.backend.switch(world.backend.plan(plan))
                x = operand(module, CAPACITY)
                module(x).sum().backward()
                assert x.grad is not None
                assert x.grad.shape == x.shape
                found = world.overlaps()
                assert found == expected or plan is not choices
            flags_of = {key: value for key, value in vars(module).items() if key.startswith("ub_")}
            assert flags_of == {key: before[key] for key in flags_of}

    def test_built_while_a_choice_stands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, EVERYTHING) as world:
            expected = {case: _ub_values(layer(*LAYERS_AT[case][:2], **LAYERS_AT[case][2])) for case in LAYERS_AT}
            for config in (RING, NONE, BULK):
                choices = {gemm: config for gemm, configs in EVERYTHING.items() if config in configs}
                world.backend.switch(world.backend.plan(choices))
                for case, values in expected.items():
                    kind, name, built, _, _ = LAYERS_AT[case]
                    assert _ub_values(layer(kind, name, **built)) == values, (case, config)

    def test_each_backward_sees_the_choice_of_its_own_forward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Forward i + 1 before backward i, each at its T."""
        small = {"qkv_fprop": NONE, "qkv_dgrad": RING}
        middle = {"qkv_fprop": AGGREGATE, "qkv_dgrad": BULK}
        large = {"qkv_fprop": RING, "qkv_dgrad": NONE}
        policy = stages(T2=small, T64=middle, T128=large)
        with te_world(monkeypatch, policy.configurations()) as world:
            manager = Manager(world.backend, (CAPACITY, HIDDEN), check="never", policy=policy)
            module = layer("linear", "qkv", **COLUMN)
            forward = {32: [], 64: ["qkv_fprop ag"], 192: ["qkv_fprop ag"]}
            backward = {32: ["qkv_dgrad (ring_exchange) rs"], 64: ["qkv_dgrad bulk ag", "qkv_wgrad bulk rs"], 192: []}
            waiting = []
            for tokens in (192, 32, 64, 32, 192, 64):
                with manager.microbatch(tokens) as microbatch:
                    waiting.append((tokens, microbatch.bind_backward(module(operand(module, tokens)))))
                    assert world.facts("qkv_fprop")["aggregate"] is (tokens == 64)
                assert world.overlaps() == forward[tokens], tokens
                if len(waiting) == 3:
                    tokens, output = waiting.pop(0)
                    output.sum().backward()
                    assert world.overlaps() == backward[tokens], tokens
            for tokens, output in reversed(waiting):
                output.sum().backward()
                assert world.overlaps() == backward[tokens], tokens
            report = manager.set_active_shape([64, HIDDEN])
            assert report.overlap["qkv_dgrad"].config == BULK
            manager.backend.connect(None)

    def test_a_callable_through_the_api(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ub_dynamic as ubd
        from ub_dynamic import api

        def choose(gemm: str, tokens: int) -> OverlapConfig | None:
            return {"proj_fprop": RING if tokens < 64 else PIPELINE, "proj_dgrad": NONE}.get(gemm)

        with policy_te.stock(monkeypatch):
            monkeypatch.setattr(api, "tensor_parallel_group", lambda *_: policy_te.Twin())
            manager = ubd.initialize_ub(
                [CAPACITY, HIDDEN], 2, quantization_modes=[fakes.MODES.NONE], backend="te", check="never", policy=choose
            )
            try:
                world = World(manager.backend)  # type: ignore[arg-type]
                for tokens, standing in ((32, "proj_fprop (ring_exchange)"), (64, "proj_fprop"), (16, None)):
                    report = ubd.set_ub_active_shape([tokens, HIDDEN])
                    assert world.standing("proj_fprop") == (standing or "proj_fprop (ring_exchange)")
                    assert report.overlap["proj_dgrad"].config == NONE
                    assert world.backend.active_tokens("proj_fprop (ring_exchange)") == tokens
                assert installed()
            finally:
                ubd.destroy_ub()
            assert installed() == {}

    def test_a_living_manager_takes_another_policy_and_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        large = stages(T2={"fc1_fprop": NONE, "fc2_dgrad": NONE, "fc2_fprop": RING})
        small = stages(T2={"fc1_fprop": NONE, "fc2_fprop": NONE}, T128={"fc2_fprop": PIPELINE})
        with te_world(monkeypatch, {**large.configurations(), "fc2_fprop": (RING, NONE, PIPELINE)}) as world:
            manager = Manager(world.backend, (CAPACITY, HIDDEN), check="never", guard=False, policy=large)
            module = layer("mlp", "fc1", **FLAGS)
            manager.set_active_shape([64, HIDDEN])

            def step() -> list[str]:
                module(operand(module, 64)).sum().backward()
                return [one for one in world.overlaps() if "bulk" not in one]

            configured = ["fc1_fprop ag", "fc2_fprop rs", "fc2_dgrad ag"]
            for _ in range(2):
                manager.use_policy(large)
                assert step() == ["fc2_fprop (ring_exchange) rs"] and installed()
                manager.use_policy(small)  # one flag for both gathers, and one of them is chosen
                assert step() == ["fc1_fprop ag", "fc2_dgrad ag"] and installed()
                manager.use_policy(None)
                assert installed() == {} and world.standing("fc2_fprop") == "fc2_fprop"
                assert step() == configured and world.settings("fc2_fprop") == (4, 16, 116)
            with pytest.raises(UBUnsupportedError, match="fc1_dgrad"):
                manager.use_policy(stages(T2={"fc1_dgrad": NONE}))
            assert installed() == {} and step() == configured
            manager.auto = True
            with pytest.raises(UBUnsupportedError, match="auto=True takes T from an operand"):
                manager.use_policy(large)
            manager.auto = False
            manager.destroy()
            with pytest.raises(UBStateError, match="after destroy"):
                manager.use_policy(large)
            assert installed() == {}

    def test_another_policy_between_a_forward_and_its_backward_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = stages(T2={"fc1_dgrad": RING})
        with te_world(monkeypatch, {"fc1_dgrad": (RING, BULK)}) as world:
            manager = Manager(world.backend, (CAPACITY, HIDDEN), check="never", policy=policy)
            module = layer("linear", "fc1", **COLUMN)
            with manager.microbatch(64) as microbatch:
                output = microbatch.bind_backward(module(operand(module, 64)))
            manager.use_policy(None)
            with pytest.raises(UBUnsupportedError, match="fc1_dgrad with a pipelined reduce-scatter"):
                output.sum().backward()
            manager.backend.connect(None)

    def test_layers_that_cannot_be_made_to_ask_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = stages(T2={"proj_fprop": RING, "proj_dgrad": NONE})
        with te_world(monkeypatch, policy.configurations()) as world:
            manager = Manager(world.backend, (CAPACITY, HIDDEN), check="never", policy=policy)
            manager.use_policy(None)
            monkeypatch.setattr(te.Linear, "ub_overlap_rs_dgrad", False, raising=False)
            with pytest.raises(UBUnsupportedError, match="te.Linear does not set ub_overlap_rs_dgrad"):
                manager.use_policy(policy)
            assert manager.policy is None and world.standing("proj_fprop") == "proj_fprop"
            monkeypatch.delattr(te.Linear, "ub_overlap_rs_dgrad")
            assert installed() == {}
            manager.use_policy(policy)
            assert installed() and world.standing("proj_fprop") == "proj_fprop (ring_exchange)"
            manager.backend.connect(None)

    def test_a_row_says_what_layernorm_mlp_really_did(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small, large = {"fc1_fprop": NONE, "fc2_fprop": RING, "qkv_fprop": NONE}, {"fc1_fprop": NONE, "fc2_dgrad": NONE}
        policy = stages(T2=small, T128=large)
        with te_world(monkeypatch, policy.configurations()) as world:
            manager = Manager(world.backend, (CAPACITY, HIDDEN), check="never", policy=policy)
            sets: Any = SimpleNamespace(manager=manager, hidden=HIDDEN, use=lambda arm: use_arm(manager, arm, policy))
            module = layer("mlp", "fc1", **FLAGS)
            steps = TESteps(sets, sets, {True: module}, torch.empty(0), KINDS["te.LayerNormMLP"])
            sets.use("dynamic")
            assert steps.policy(64) == {
                "policy": "fc1_fprop none, fc2_fprop ring_exchange",
                "policy_otherwise": "fc1_fprop overlaps all the same: LayerNormMLP has one flag for it and fc2_dgrad",
            }
            assert steps.policy(128) == {"policy": "fc1_fprop none, fc2_dgrad none"}
            whole = TESteps(sets, sets, {True: module}, torch.empty(0), KINDS["te.TransformerLayer"])
            assert whole.policy(64)["policy"].endswith(", qkv_fprop none")
            manager.backend.connect(None)

    @pytest.mark.parametrize("arm", ["dynamic", "exact", "pad", "unguarded", "none", "auto"])
    def test_arms_without_a_policy_leave_the_layers_as_built(self, arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = stages(T2={"proj_fprop": RING, "proj_dgrad": NONE})
        with te_world(monkeypatch, policy.configurations()) as world:
            manager = Manager(world.backend, (CAPACITY, HIDDEN), check="never", policy=policy)
            for _ in range(2):
                use_arm(manager, "policy", policy)
                assert installed() and world.standing("proj_fprop") == "proj_fprop (ring_exchange)"
                use_arm(manager, arm, policy)
                assert installed() == {} and world.standing("proj_fprop") == "proj_fprop"
            manager.backend.connect(None)

    def test_the_guard_knows_the_alternatives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = stages(T2={"proj_fprop": RING})
        with te_world(monkeypatch, policy.configurations()) as world:
            manager = Manager(world.backend, (CAPACITY, HIDDEN), check="never", policy=policy)
            module = layer("linear", "proj", **ROW)
            manager.set_active_shape([64, HIDDEN])
            with pytest.raises(UBShapeError, match=r"proj_fprop \(ring_exchange\): the microbatch has 128 tokens"):
                module(operand(module, 128))
            assert world.overlaps() == []
            module(operand(module, 64)).sum().backward()
            assert world.backend.guard.runs["proj_fprop (ring_exchange)", "GEMM + reduce-scatter"] == 1
            rows = {row["name"]: row for row in world.backend.doctor_report()["communicators"]}
            assert rows["proj_fprop (ring_exchange)"]["stands_for"] == "proj_fprop"
            assert rows["proj_fprop"]["stands_for"] == "proj_fprop (ring_exchange)"
            assert rows["proj_fprop (ring_exchange)"]["overlaps"] == {"GEMM + reduce-scatter": 1}
            manager.backend.connect(None)

    def test_hazards_follow_the_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, {"qkv_dgrad": (RING, BULK)}) as world:
            world.backend.connect(lambda name, tokens: None)
            rings = layer("linear", "qkv", ub_overlap_ag=True, ub_overlap_rs_dgrad=True)
            with pytest.raises(UBUnsupportedError, match="qkv_dgrad with a pipelined"):  # configured as bulk
                rings(operand(rings, CAPACITY))
            switch(world, qkv_dgrad=RING)
            rings(operand(rings, CAPACITY)).sum().backward()
            switch(world, qkv_dgrad=BULK)
            rings(operand(rings, CAPACITY)).sum().backward()
            frozen = layer("linear", "qkv", **COLUMN).requires_grad_(False)
            with pytest.raises(UBUnsupportedError, match="frozen weight and ub_bulk_wgrad"):
                frozen(operand(frozen, CAPACITY))
            switch(world, qkv_dgrad=RING)
            frozen(operand(frozen, CAPACITY)).sum().backward()
            world.backend.connect(None)

    def test_a_fused_operation_has_no_ring_backward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformer_engine.pytorch.ops.fused.userbuffers_backward_linear import UserbuffersBackwardLinear as Fused

        reached: list[dict[str, Any]] = []
        monkeypatch.setattr(Fused, "_functional_backward", staticmethod(lambda **given: reached.append(given)))
        given = {"ub_comm_name": "fc1", "tensor_parallel_mode": "column", "weight_requires_grad": True}
        with te_world(monkeypatch, {"fc1_dgrad": (RING, BULK)}) as world:
            world.backend.connect(lambda name, tokens: None)
            switch(world, fc1_dgrad=RING)
            with pytest.raises(UBUnsupportedError, match=r"chose ring_exchange for fc1_dgrad.*te\.ops"):
                Fused._functional_backward(**given)
            Fused._functional_backward(**given | {"weight_requires_grad": False})  # it reduce-scatters then
            switch(world, fc1_dgrad=BULK)
            Fused._functional_backward(**given)
            with pytest.raises(UBUnsupportedError, match="fc1_dgrad with a pipelined"):
                Fused._functional_backward(**given | {"weight_requires_grad": False})
            assert len(reached) == 2
            world.backend.connect(None)

    def test_notes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, EVERYTHING) as world:
            notes = world.backend.notes
            assert set(notes) == set(EVERYTHING)
            assert "one flag" in notes["fc1_fprop"]
            assert "one flag" in notes["fc2_dgrad"]
            assert "te.ops has a bulk overlap only" in notes["qkv_dgrad"]
        with te_world(monkeypatch, {"proj_fprop": (RING, PIPELINE)}) as world:
            assert world.backend.notes == {}


def _ub_values(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name.startswith("ub_")}

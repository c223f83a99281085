# SPDX-License-Identifier: Apache-2.0
"""A policy on TE's communicators and layers: what stands, what is set, what the layers overlap, at each T."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from types import SimpleNamespace
from typing import Any

import fakes
import policy_te
import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.module.base as base
from cpu_te import CAPACITY, HIDDEN, layer, operand
from policy_te import AGGREGATE, BULK, NONE, PIPELINE, RING, World, stages, te_world

from ub_dynamic.backends.te import flags
from ub_dynamic.bench.arms import use_arm
from ub_dynamic.bench.te_steps import TESteps
from ub_dynamic.errors import UBShapeError, UBStateError, UBUnsupportedError
from ub_dynamic.manager import Manager
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.testing.te_layers import KINDS

EVERYTHING = {
    "qkv_fprop": (AGGREGATE, NONE),
    "qkv_dgrad": (RING, OverlapConfig("bulk", num_sm=2), NONE),
    "proj_fprop": (RING, PIPELINE, OverlapConfig("pipeline", num_sm=8, num_splits=8, first_gemm=True), NONE),
    "proj_dgrad": (RING, NONE),
    "fc1_fprop": (AGGREGATE, NONE),
    "fc1_dgrad": (RING, BULK, NONE),
    "fc2_fprop": (RING, PIPELINE, NONE),
    "fc2_dgrad": (AGGREGATE, NONE),
}
FLAGS = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}
COLUMN = {name: value for name, value in FLAGS.items() if name != "ub_overlap_rs"}
ROW = {"ub_overlap_ag": True, "ub_overlap_rs": True}


def switch(world: World, **choices: OverlapConfig) -> None:
    world.backend.switch(world.backend.plan(choices))


class TestPlans:
    def test_settings_are_written_and_go_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, EVERYTHING) as world:
            assert world.settings("proj_fprop") == (4, 16, 116)
            wide, bulk = EVERYTHING["proj_fprop"][2], EVERYTHING["qkv_dgrad"][1]
            switch(world, proj_fprop=wide, qkv_fprop=AGGREGATE, qkv_dgrad=bulk)
            assert world.settings("proj_fprop") == (8, 8, 124)  # the GEMM gets what the communication leaves
            assert world.facts("proj_fprop")["first_gemm"] is True
            assert world.facts("qkv_fprop")["aggregate"] is True
            assert world.settings("qkv_dgrad")[1:] == world.settings("qkv_wgrad")[1:] == (2, 130)
            switch(world, proj_fprop=PIPELINE)
            assert world.settings("proj_fprop") == (2, 4, 128)
            assert world.facts("proj_fprop")["first_gemm"] is False
            assert world.facts("qkv_fprop")["aggregate"] is False
            assert world.settings("qkv_dgrad")[1:] == world.settings("qkv_wgrad")[1:] == (16, 116)
            switch(world)
            assert world.settings("proj_fprop") == (4, 16, 116)

    def test_no_margin_no_change_of_the_gemm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cfgs = {"fc2_fprop": {"set_sm_margin": False, "num_sm": 8, "num_splits": 2}}
        with te_world(monkeypatch, {"fc2_fprop": (PIPELINE,)}, cfgs) as world:
            assert world.settings("fc2_fprop") == (2, 8, 132)
            switch(world, fc2_fprop=PIPELINE)
            assert world.settings("fc2_fprop") == (2, 4, 132)

    def test_another_object_stands_under_the_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, EVERYTHING, {"fc1_dgrad": {"method": "ring_exchange"}}) as world:
            pairs = {"proj_fprop": "ring_exchange", "fc2_fprop": "ring_exchange", "qkv_dgrad": "ring_exchange",
                     "fc1_dgrad": "bulk"}  # fmt: skip
            assert all(world.standing(name) == name for name in pairs)
            before = dict(base._ub_communicators)
            for name, method in pairs.items():
                for _ in range(2):  # the second one changes nothing
                    switch(world, **{name: OverlapConfig(method)})
                    assert world.standing(name) == f"{name} ({method})"
                    assert all(world.standing(other) == other for other in pairs if other != name)
            switch(world, **{name: OverlapConfig(method) for name, method in pairs.items()})
            assert all(world.standing(name) == f"{name} ({method})" for name, method in pairs.items())
            switch(world, **dict.fromkeys(pairs, NONE))
            assert all(world.standing(name) == name for name in pairs)
            assert base._ub_communicators == before
            assert list(base._ub_communicators) == list(before)

    @pytest.mark.parametrize(
        ("choices", "kind", "text"),
        [
            ({"qkv_fprop": PIPELINE}, UBUnsupportedError, "no method 'pipeline'"),
            ({"proj_dgrad": RING}, UBUnsupportedError, r"proj_dgrad: no communicator was made.*alternatives \[\]"),
            ({"proj_fprop": RING}, UBUnsupportedError, "no communicator was made for ring_exchange.*num_splits=2"),
            ({"proj_fprop": NONE}, UBUnsupportedError, "may be switched off"),
            ({"proj_fprop": OverlapConfig("pipeline", num_splits=8)}, UBShapeError, "the next valid value is 4"),
            ({"proj_fprop": OverlapConfig("pipeline", num_splits=3)}, UBShapeError, "num_splits = 24"),
            ({"proj_fprop": OverlapConfig("pipeline", num_sm=40)}, UBShapeError, "the next valid value is 32"),
            ({"fc2_fprop": AGGREGATE}, UBUnsupportedError, "aggregate"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, choices: dict[str, Any], kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with te_world(monkeypatch, {"proj_fprop": (PIPELINE,), "fc2_fprop": (RING,)}) as world:
            before = world.settings("proj_fprop")
            with pytest.raises(kind, match=text):
                world.backend.plan(choices)
            assert world.settings("proj_fprop") == before

    def test_the_gemm_keeps_a_multiprocessor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, {"proj_fprop": (PIPELINE,)}) as world:
            native = world.backend.native
            assert native is not None
            native.set_settings(world.object("proj_fprop"), 4, 16, 10)  # a device of 26
            world.backend._plans._made = policy_te_read(world)
            with pytest.raises(UBShapeError, match="no multiprocessor of 26; the next valid value is 25"):
                world.backend.plan({"proj_fprop": OverlapConfig("pipeline", num_sm=28)})

    def test_without_alternatives_nothing_can_be_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, None) as world:
            world.backend.switch(world.backend.plan({}))
            assert world.backend.notes == {}
            with pytest.raises(UBUnsupportedError, match="no alternatives"):
                world.backend.plan({"fc2_fprop": RING})
            assert len(base._ub_communicators) == 12
            assert not installed()

    def test_the_native_plan_checks_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        native = fakes.native.load()
        registry = native.Registry()
        ring, bulk = fakes.communicator(True, (64, 32), 2), fakes.communicator(False, (64, 32), 2)
        registry.add(ring, 64)
        registry.add(bulk, 64)
        for setting in ([0, 2, 1, 132, 0, 1], [1, 4, 16, 116, 1, 0]):
            with pytest.raises(ValueError, match="a flag that its communicator does not have"):
                registry.plan([setting], [])
        for setting in ([1, 0, 16, 116, -1, 0], [1, 4, 0, 116, -1, 0], [1, 4, 16, 0, -1, 0]):
            with pytest.raises(ValueError, match="at least 1"):
                registry.plan([setting], [])
        with pytest.raises(IndexError):
            registry.plan([[2, 4, 16, 116, -1, -1]], [])
        with pytest.raises(ValueError, match="every pair"):
            registry.plan([], [True])
        registry.switch(registry.plan([[0, 2, 3, 129, 1, -1], [1, 8, 4, 128, -1, 1]], []))
        assert native.settings(ring) == (2, 3, 129)
        assert native.inspect(ring)["aggregate"] is True
        assert native.inspect(bulk)["first_gemm"] is True

    def test_a_table_that_is_gone_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, {"fc2_fprop": (RING,)}) as world:
            plan = world.backend.plan({"fc2_fprop": RING})
            table = base._ub_communicators
            base._ub_communicators = None
            with pytest.raises(RuntimeError, match="table of communicators is gone"):
                world.backend.switch(plan)
            base._ub_communicators = table
            assert world.standing("fc2_fprop") == "fc2_fprop"

    def test_a_destroyed_communicator_is_never_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, {"fc2_fprop": (RING,)}) as world:
            plan = world.backend.plan({"fc2_fprop": RING})
            base.destroy_ub()
            gc.collect()
            with pytest.raises(RuntimeError, match="destroyed behind the registry's back"):
                world.backend.switch(plan)


def policy_te_read(world: World) -> Any:
    from ub_dynamic.backends.te import plans

    assert world.backend._plans is not None
    return plans._read(world.backend._plans._arrangement, world.backend.communicators, world.backend.native)  # type: ignore[arg-type]


class TestCost:
    def test_switching_a_hundred_thousand_times_takes_no_memory(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def count(name: str) -> int:
            return ctypes.c_ssize_t.from_address(id(world.object(name))).value

        with te_world(monkeypatch, EVERYTHING) as world:
            ways = [
                world.backend.plan({gemm: configs[number % len(configs)] for gemm, configs in EVERYTHING.items()})
                for number in range(5)
            ]
            same = ways[0]
            change = world.backend.switch
            for number in range(10_000):
                change(ways[number % 5])
            counts = {name: count(name) for name in world.backend.specs}
            resident = _resident_bytes()
            for number in range(100_000):
                change(ways[number % 5])
            grown = _resident_bytes() - resident
            assert counts == {name: count(name) for name in world.backend.specs}
            assert grown < 1 << 20, f"{grown} bytes"
            cost = {"five plans in turn": _microseconds(change, ways), "the same again": _microseconds(change, [same])}
        with capsys.disabled():
            print("\nswitch, us:", {name: round(value, 2) for name, value in cost.items()})


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _microseconds(change: Any, plans: list[Any]) -> float:
    taken = []
    for number in range(20_000):
        plan = plans[number % len(plans)]
        begin = time.perf_counter_ns()
        change(plan)
        taken.append(time.perf_counter_ns() - begin)
    return statistics.median(taken) / 1000


def installed() -> dict[str, list[str]]:
    """The descriptors that stand on TE's classes."""
    found = {kind.__name__: [name for name, value in vars(kind).items() if isinstance(value, flags._Flag)]
             for kind in (te.Linear, te.LayerNormLinear, te.LayerNormMLP)}  # fmt: skip
    return {name: names for name, names in found.items() if names}


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


class TestInstallation:
    def test_nothing_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kinds = (te.Linear, te.LayerNormLinear, te.LayerNormMLP)
        before = {kind: dict(vars(kind)) for kind in kinds}
        with te_world(monkeypatch, EVERYTHING) as world:
            assert {name: len(names) for name, names in installed().items()} == {
                "Linear": 6, "LayerNormLinear": 6, "LayerNormMLP": 5
            }  # fmt: skip
            module = layer("linear", "qkv", **COLUMN)
            switch(world, qkv_fprop=NONE)
            assert module.ub_overlap_ag_fprop is False
        assert installed() == {}
        assert {kind: dict(vars(kind)) for kind in kinds} == before
        assert module.ub_overlap_ag_fprop is True

    def test_only_where_a_choice_needs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, {"proj_fprop": (RING, PIPELINE), "fc1_dgrad": (BULK,)}):
            assert installed() == {}
        with te_world(monkeypatch, {"fc1_dgrad": (RING,)}):
            assert installed()

    def test_a_class_that_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Linear(te.LayerNormMLP):
            def __init__(self) -> None:
                pass

        monkeypatch.setattr(te, "Linear", Linear)
        unknown = pytest.raises(UBUnsupportedError, match="Linear does not set ub_overlap_ag_fprop")
        with unknown, te_world(monkeypatch, {"fc1_dgrad": (RING,)}):
            pass
        assert installed() == {}
        assert base._ub_communicators is None

    def test_descriptors_are_attributes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, EVERYTHING):
            module = layer("linear", "qkv", **COLUMN)
            module.ub_bulk_dgrad = False
            assert vars(module)["ub_bulk_dgrad"] is False
            del module.ub_bulk_dgrad
            with pytest.raises(AttributeError, match="ub_bulk_dgrad"):
                _ = module.ub_bulk_dgrad
            with pytest.raises(AttributeError):
                del module.ub_bulk_dgrad

    def test_a_failed_start_takes_the_descriptors_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ub_dynamic.backends.te import initialize

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no backend")

        monkeypatch.setattr(initialize, "TEBackend", fail)
        with pytest.raises(RuntimeError, match="no backend"), te_world(monkeypatch, EVERYTHING):
            pass
        assert installed() == {}

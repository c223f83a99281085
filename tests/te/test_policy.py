# SPDX-License-Identifier: Apache-2.0
"""A policy on TE's communicators: what stands, what is set, what is refused, and what a switch costs."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from typing import Any

import fakes
import pytest
import transformer_engine.pytorch.module.base as base
from policy_te import (
    AGGREGATE,
    EVERYTHING,
    NONE,
    PIPELINE,
    RING,
    World,
    installed,
    switch,
    te_world,
)

from ub_dynamic.errors import UBShapeError, UBUnsupportedError
from ub_dynamic.overlap import OverlapConfig


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
        registry.plan([[0, 2, 3, 129, 1, -1], [1, 8, 4, 128, -1, 1]], [])()
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

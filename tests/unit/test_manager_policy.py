# SPDX-License-Identifier: Apache-2.0
"""The manager switches each GEMM to what a policy chooses at the active shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from fake_backend import FakeBackend
from managers import Seen, make

from ub_dynamic.errors import (
    UBShapeError,
    UBStateError,
    UBUnsupportedError,
)
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice, Policy

RING, NONE, PIPELINE = OverlapConfig("ring_exchange"), OverlapConfig("none"), OverlapConfig("pipeline", num_splits=2)
SMALL, LARGE = {"fc2_fprop": Choice(NONE, "small")}, {"fc2_fprop": Choice(PIPELINE, "large")}
POLICY = Policy((1, 32, 64), (SMALL, {}, LARGE))


class TestPolicy:
    def test_the_stage_of_capacity_stands_from_the_start(self) -> None:
        _, backend = make(policy=POLICY)
        assert backend.calls == [{"fc2_fprop": PIPELINE}]

    def test_a_stage_is_switched_before_its_shape_is_applied_and_only_where_it_differs(self) -> None:
        manager, backend = make(policy=POLICY)
        backend.calls.clear()
        for tokens in (100, 64, 60, 60, 8, 4, 128):
            assert manager.set_active_shape([tokens, 64]).overlap == POLICY.choices(tokens)
        assert backend.calls == [100, 64, {}, 60, {"fc2_fprop": NONE}, 8, 4, {"fc2_fprop": PIPELINE}, 128]

    def test_stages_with_the_same_choices_are_one_plan_but_say_their_own_reason(self) -> None:
        again = {"fc2_fprop": Choice(PIPELINE, "larger")}
        manager, backend = make(policy=Policy((1, 64), (LARGE, again)))
        assert manager.set_active_shape([32, 64]).overlap == LARGE
        assert manager.set_active_shape([128, 64]).overlap == again
        assert backend.calls == [{"fc2_fprop": PIPELINE}, 32, 128]

    def test_without_a_policy_nothing_is_switched(self) -> None:
        manager, backend = make()
        assert manager.set_active_shape([64, 64]).overlap == {} and backend.calls == [64]

    def test_contexts_restore_the_choice_with_the_shape(self) -> None:
        manager, backend = make(policy=POLICY)
        backend.calls.clear()
        with pytest.raises(ZeroDivisionError), manager.microbatch(8):  # noqa: PT012
            assert manager.set_active_shape([8, 64]).overlap == SMALL
            raise ZeroDivisionError
        assert backend.calls == [{"fc2_fprop": NONE}, 8, {"fc2_fprop": PIPELINE}, 128]
        assert manager.set_active_shape([128, 64]).overlap == LARGE

    def test_each_backward_sees_the_choice_of_its_shape(self) -> None:
        manager, backend = make(policy=POLICY)
        notes: list[int] = []
        with manager.microbatch(8) as mb:
            output = mb.bind_backward(Seen.apply(torch.ones(2, requires_grad=True), manager, notes))
        backend.calls.clear()
        output.sum().backward()
        assert notes == [8] and backend.calls == [{"fc2_fprop": NONE}, 8]

    def test_a_refused_shape_leaves_the_choice(self) -> None:
        manager, backend = make(policy=POLICY)
        backend.calls.clear()
        for shape, why in (([6, 64], None), ([8, 64], "a filled buffer")):
            backend.why_busy = why
            with pytest.raises((UBShapeError, UBStateError)):
                manager.set_active_shape(shape)
        backend.why_busy = None
        assert backend.calls == [] and manager.set_active_shape([128, 64]).overlap == LARGE

    def test_a_policy_that_the_backend_cannot_follow_changes_nothing(self) -> None:
        backend = FakeBackend()
        bad = Policy((1, 64), (SMALL, {"fc1_fprop": Choice(OverlapConfig("bulk"), "")}))
        with pytest.raises(UBUnsupportedError, match="fc1_fprop has no method 'bulk'"):
            make(backend, policy=bad)
        assert backend.calls == [] and backend.on_operand is None

    def test_auto_switches_too(self) -> None:
        manager, backend = make(policy=POLICY, auto=True)
        assert backend.on_operand is not None
        backend.on_operand("fc1_fprop", 8)
        assert backend.calls[1:] == [{"fc2_fprop": NONE}, 8] and manager.active == (8, 64)

    def test_a_living_manager_takes_another_policy_and_none(self) -> None:
        manager, backend = make(policy=POLICY)
        manager.set_active_shape([8, 64])
        manager.set_buffer_active_shape("fc1_fprop", [32, 64])
        backend.calls.clear()
        other = Policy((1, 16), ({"fc2_fprop": Choice(RING, "other")}, SMALL))
        manager.use_policy(other)
        assert backend.calls == [{"fc2_fprop": RING}] and manager.policy is other and backend.followed[-1] is True
        assert manager.active == (8, 64) and manager.buffer_active_shape("fc1_fprop") == (32, 64)
        assert manager.set_active_shape([4, 64]).overlap == other.stages[0]
        assert manager.set_active_shape([16, 64]).overlap == SMALL
        manager.use_policy(None)
        assert manager.policy is None and backend.followed[-1] is False
        assert manager.set_active_shape([16, 64]).overlap == {}
        assert manager.set_active_shape([128, 64]).overlap == {}
        assert backend.calls[1:] == [4, {"fc2_fprop": NONE}, 16, {}, 128]

    def test_the_same_policy_again_stands_where_it_stood(self) -> None:
        """Somebody else may have switched the backend."""
        manager, backend = make(policy=POLICY)
        manager.set_active_shape([8, 64])
        backend.switch({})
        manager.use_policy(POLICY)
        assert backend.calls[-1] == {"fc2_fprop": NONE} and manager.set_active_shape([8, 64]).overlap == SMALL

    @pytest.mark.parametrize("why", ["unknown", "type", "busy", "layers", "auto", "destroyed"])
    def test_a_refused_policy_changes_nothing(self, why: str) -> None:
        manager, backend = make(policy=POLICY)
        manager.set_active_shape([8, 64])
        wanted: Any = Policy((1,), (LARGE,))
        if why == "unknown":
            wanted = Policy((1, 64), (LARGE, {"fc1_fprop": Choice(OverlapConfig("bulk"), "")}))
        elif why == "type":
            wanted = "table.json"
        elif why == "busy":
            backend.why_busy = "a filled buffer"
        elif why == "layers":
            backend.cannot_follow = "this TE is not known"
        elif why == "auto":
            manager.auto, backend.auto_excludes_policy = True, "auto comes too late"
        else:
            manager.destroy()
        backend.calls.clear()
        text = {
            "unknown": "fc1_fprop has no method 'bulk'",
            "type": "'table.json' is no Policy: TuningTable.policy",
            "busy": "the policy cannot change now: a filled buffer",
            "layers": "this TE is not known",
            "auto": "auto comes too late",
            "destroyed": "after destroy",
        }[why]
        with pytest.raises((UBStateError, UBUnsupportedError), match=text):
            manager.use_policy(wanted)
        assert backend.calls == [] and manager.policy is POLICY
        backend.why_busy = None
        if why != "destroyed":
            assert manager.set_active_shape([8, 64]).overlap == SMALL

    @pytest.mark.parametrize("kind", [RuntimeError, UBStateError])
    def test_communicators_that_are_gone_leave_the_old_policy(
        self, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        manager, backend = make(policy=POLICY)

        def gone(plan: Any) -> None:
            raise kind("the table of communicators is gone")

        followed: list[bool] = []
        monkeypatch.setattr(backend, "switch", gone)
        monkeypatch.setattr(backend, "follow_choices", followed.append)
        with pytest.raises(UBStateError, match="the policy cannot change: the table of communicators is gone"):
            manager.use_policy(None)
        assert manager.policy is POLICY
        assert followed == [False, True]

    def test_auto_goes_back_to_the_configuration(self) -> None:
        manager, backend = make(policy=POLICY)
        backend.auto_excludes_policy = "auto comes too late"
        manager.auto = True
        manager.use_policy(None)
        assert manager.policy is None and backend.calls[-1] == {}

    def test_a_named_change_reaches_the_alternatives(self) -> None:
        backend = FakeBackend()
        other = dataclasses.replace(
            backend.specs["fc2_fprop"], name="fc2_fprop (ring_exchange)", method="ring_exchange"
        )
        backend.specs[other.name] = other
        manager, _ = make(backend)
        assert manager.set_active_shape([64, 64], names="fc2_fprop").updated == ("fc2_fprop", other.name)
        assert backend.calls == [("fc2_fprop", 64), (other.name, 64)]

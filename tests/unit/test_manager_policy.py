# SPDX-License-Identifier: Apache-2.0
"""The manager switches each GEMM to what a policy chooses at the active shape."""

from __future__ import annotations

import dataclasses

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

    def test_a_named_change_reaches_the_alternatives(self) -> None:
        backend = FakeBackend()
        other = dataclasses.replace(
            backend.specs["fc2_fprop"], name="fc2_fprop (ring_exchange)", method="ring_exchange"
        )
        backend.specs[other.name] = other
        manager, _ = make(backend)
        assert manager.set_active_shape([64, 64], names="fc2_fprop").updated == ("fc2_fprop", other.name)
        assert backend.calls == [("fc2_fprop", 64), (other.name, 64)]

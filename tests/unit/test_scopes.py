# SPDX-License-Identifier: Apache-2.0
"""Scopes of an active shape: what they give, what they restore, and when."""

from __future__ import annotations

import pytest
from fake_backend import FakeBackend

from ub_dynamic.errors import UBShapeError, UBStateError
from ub_dynamic.manager import Manager
from ub_dynamic.scopes import Microbatch

CAPACITY = (128, 64)


@pytest.fixture
def manager() -> Manager:
    return Manager(FakeBackend(CAPACITY), CAPACITY, check="never")


def test_what_the_block_gets(manager: Manager) -> None:
    with manager.active_shape([64, 64]) as report:
        assert report.shape == manager.active == (64, 64)
    with manager.microbatch(32) as handle:
        assert isinstance(handle, Microbatch)
        assert (handle.tokens, handle.shape, manager.active) == (32, (32, 64), (32, 64))
    assert manager.active == CAPACITY


def test_nested_scopes_restore_one_after_the_other(manager: Manager) -> None:
    manager.set_buffer_active_shape("fc1_fprop", (8, 64))
    with manager.active_shape([64, 64]):
        with manager.microbatch(32):
            assert manager.active == (32, 64)
        assert manager.active == (64, 64)
        assert manager.buffer_active_shape("fc1_fprop") == (64, 64)
    assert manager.active == CAPACITY
    assert manager.buffer_active_shape("fc1_fprop") == (8, 64)


def test_what_is_refused_at_the_door_changes_nothing(manager: Manager) -> None:
    scope = manager.active_shape([63, 64])
    for _ in range(2):  # it was not entered, so it may be tried again
        with pytest.raises(UBShapeError, match="T = 63"), scope:
            raise AssertionError("the block ran")
    assert manager.active == CAPACITY


@pytest.mark.parametrize("nested", [True, False])
def test_a_scope_is_for_one_block(manager: Manager, nested: bool) -> None:
    scope = manager.microbatch(64)
    with scope:
        if nested:
            with pytest.raises(UBStateError, match="entered already"), scope:
                raise AssertionError("the block ran")
            assert manager.active == (64, 64)
    assert manager.active == CAPACITY
    with pytest.raises(UBStateError, match="entered already"), scope:
        raise AssertionError("the block ran")


def test_an_exception_of_the_block_comes_out(manager: Manager) -> None:
    with pytest.raises(KeyError, match="mine"), manager.active_shape([64, 64]):
        raise KeyError("mine")
    assert manager.active == CAPACITY


def test_an_exception_of_the_block_says_more_than_that_the_shape_cannot_be_restored() -> None:
    backend = FakeBackend(CAPACITY)
    manager = Manager(backend, CAPACITY, check="never")

    def fail() -> None:
        backend.why_busy = "an overlap that failed"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), manager.active_shape([64, 64]):
        fail()
    assert manager.active == (64, 64)


def test_destroy_in_the_block_leaves_nothing_to_restore(manager: Manager) -> None:
    with manager.active_shape([64, 64]):
        manager.destroy()

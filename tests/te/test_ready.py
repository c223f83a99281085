# SPDX-License-Identifier: Apache-2.0
"""The native answer to "may the shape change": True exactly where Python would go on, and nothing done otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
import transformer_engine.pytorch.graph as graph
from cpu_te import CAPACITY, HIDDEN, te_world

from ub_dynamic.backends.te import native
from ub_dynamic.backends.te.backend import TEBackend
from ub_dynamic.board import RankBoard
from ub_dynamic.errors import UBRankMismatchError, UBShapeError, UBStateError
from ub_dynamic.manager import Manager
from ub_dynamic.rules import TokenRule
from ub_dynamic.testing.thread_group import on_threads

pytestmark = pytest.mark.te
RULE = TokenRule(multiple=8, minimum=16, maximum=CAPACITY)


class Place:
    """A manager on the first of two boards, the peer's board, and the question that a change asks."""

    def __init__(self, backend: TEBackend) -> None:
        self.board, self.peer = boards()
        self.board.use_native(native.load().Board)
        self.backend = backend
        self.manager = Manager(backend, (CAPACITY, HIDDEN), board=self.board)
        ask = backend.make_ready(RULE, self.board)
        assert ask is not None
        self.ask = ask


def boards() -> list[RankBoard]:
    return on_threads(2, lambda group: RankBoard(group, slots=32, settle_s=0.01, timeout_s=0.1))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with te_world(monkeypatch, guard=False) as world:
        yield Place(world.backend)


def test_a_change_that_may_be_made_is_published(place: Place) -> None:
    for calls, tokens in enumerate((16, CAPACITY, 64, 64), start=1):
        place.peer.exchange(tokens)
        assert place.ask(tokens) is True
        assert place.board.calls == calls
    place.board.check()


@pytest.mark.parametrize(
    "tokens", [-(1 << 70), -8, 0, 8, 15, 17, CAPACITY - 4, CAPACITY + 1, CAPACITY + 8, 1 << 63, 1 << 70]
)
def test_t_that_the_rule_refuses(place: Place, tokens: int) -> None:
    assert not RULE.accepts(tokens)
    assert place.ask(tokens) is False
    assert place.board.calls == 0


@pytest.mark.parametrize("what", ["lent", "enqueuing", "capture", "te captures", "no guard", "peer"])
def test_what_is_in_the_way_leaves_it_to_python(place: Place, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = place.backend.guard
    kept = torch.zeros(1)
    match what:
        case "lent":
            guard._lent["qkv_fprop"] = weakref.ref(kept)
        case "enqueuing":
            guard._enqueuing[1] = "qkv_fprop"
        case "capture":
            guard._captures.under_way["captures"] = 1
        case "te captures":
            monkeypatch.setattr(graph, "_IS_GRAPH_CAPTURING", True)
        case "no guard":
            place.backend.connect(None)
        case "peer":
            place.peer.exchange(128)
    assert place.ask(64) is False
    assert place.board.calls == 0
    if what == "no guard":
        place.manager.set_active_shape([64, HIDDEN])  # Python asks the long way, and goes on
        assert place.board.calls == 1
        return
    with pytest.raises(UBRankMismatchError if what == "peer" else UBStateError):
        place.manager.set_active_shape([64, HIDDEN])
    assert place.manager.active == (CAPACITY, HIDDEN)
    assert place.backend.active_tokens("qkv_fprop") == CAPACITY
    guard._lent.clear()
    guard._enqueuing.clear()
    guard._captures.under_way.clear()


def test_the_manager_goes_the_short_way(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def long_way(tokens: int) -> None:
        raise AssertionError(f"T = {tokens} took the long way")

    monkeypatch.setattr(place.manager, "_prepare", long_way)
    for tokens in (64, 128, 64):
        place.manager.set_active_shape([tokens, HIDDEN])
        assert place.backend.active_tokens("fc2_fprop") == tokens
        place.peer.exchange(tokens)
    with pytest.raises(AssertionError, match="took the long way"):
        place.manager.set_active_shape([9, HIDDEN])


def test_a_board_without_native_code_has_no_short_way(place: Place) -> None:
    assert place.backend.make_ready(RULE, boards()[0]) is None
    without = place.backend.make_ready(RULE, None)
    assert without is not None
    assert without(64) is True


def test_an_error_of_te_is_not_swallowed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise ValueError("broken")

    monkeypatch.setattr(place.backend.guard._captures, "te", broken)
    ask = place.backend.make_ready(RULE, place.board)
    assert ask is not None
    with pytest.raises(ValueError, match="broken"):
        ask(64)
    assert place.board.calls == 0


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (9, "the next valid"),
        (-8, "tokens must be positive"),
        (-(1 << 70), "tokens must be positive"),
        (CAPACITY + 8, "exceed"),
        (1 << 63, "exceed"),
        (1 << 70, "exceed"),
    ],
)
def test_a_bad_t_says_what_it_always_said(place: Place, tokens: int, text: str) -> None:
    with pytest.raises(UBShapeError, match=text):
        place.manager.set_active_shape([tokens, HIDDEN])
    assert place.board.calls == 0


def test_a_difference_that_is_seen_after_publishing_is_raised(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_the_same_moment(tokens: int) -> None:
        place.board.publish(tokens)
        place.peer.publish(2 * tokens)

    monkeypatch.setattr(place.manager, "_ready", at_the_same_moment)
    with pytest.raises(UBRankMismatchError, match="rank 10: T = 64; rank 11: T = 128"):
        place.manager.set_active_shape([64, HIDDEN])
    assert place.manager.active == (CAPACITY, HIDDEN)
    assert place.board.calls == 1

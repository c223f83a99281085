# SPDX-License-Identifier: Apache-2.0
"""The native fast path of the rank board finds what the Python side finds, on the same memory."""

from __future__ import annotations

import random

import pytest

from ub_dynamic.board import RankBoard
from ub_dynamic.errors import UBRankMismatchError
from ub_dynamic.testing.thread_group import on_threads

pytestmark = pytest.mark.te


def boards(size: int, native_ranks: set[int]) -> list[RankBoard]:
    import transformer_engine_torch  # noqa: F401  (its library is what the native file is linked to)

    from ub_dynamic.backends.te import native

    made = on_threads(size, lambda group: RankBoard(group, slots=32, settle_s=0.01, timeout_s=0.1))
    for rank in native_ranks:
        made[rank].use_native(native.load().Board)
    return made


@pytest.mark.parametrize("native_ranks", [{0}, {0, 1, 2}])
def test_agreement_is_silent(native_ranks: set[int]) -> None:
    made = boards(3, native_ranks)
    choose = random.Random(5)
    for tokens in range(1, 200):
        for board in choose.sample(made, 3):
            board.exchange(tokens)
    assert [board.calls for board in made] == [199] * 3


@pytest.mark.parametrize("when", [1, 7, 40])
def test_a_difference_is_named_by_all(when: int) -> None:
    made = boards(2, {0, 1})
    for tokens in range(1, when):
        for board in made:
            board.exchange(tokens * 8)
    made[0].exchange(8)
    for board in (made[1], made[0], made[1]):
        with pytest.raises(UBRankMismatchError, match=f"shape change {when}: rank 10: T = 8; rank 11: T = 16"):
            board.exchange(16) if board.calls < when else board.check()


def test_the_native_side_leaves_a_rank_far_ahead_to_the_python_side() -> None:
    first, _ = boards(2, {0})
    for _ in range(8):
        first.exchange(8)
    with pytest.raises(UBRankMismatchError, match=r"rank\(s\) \[11\] are more than 8 shape changes behind"):
        first.exchange(8)
    assert first.calls == 9


def test_memory_of_another_size_is_refused() -> None:
    from ub_dynamic.backends.te import native

    first, _ = boards(2, set())
    with pytest.raises(RuntimeError, match="rank board"):
        native.load().Board(first._words, first._compared, 0, 3, 32, 8)

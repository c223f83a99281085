# SPDX-License-Identifier: Apache-2.0
"""The native fast path of the rank board finds what the Python side finds, on the same memory."""

from __future__ import annotations

import mmap
import os
import random
import time

import pytest
import transformer_engine_torch  # noqa: F401  # its library is what the native file is linked to

from ub_dynamic.backends.te import native
from ub_dynamic.board import RankBoard
from ub_dynamic.errors import UBRankMismatchError
from ub_dynamic.testing.thread_group import on_threads

pytestmark = pytest.mark.te


def boards(size: int, native_ranks: set[int]) -> list[RankBoard]:
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
    first, _ = boards(2, set())
    with pytest.raises(RuntimeError, match="rank board"):
        native.load().Board(first._words, first._compared, 0, 3, 32, 8)


def test_what_was_not_made_is_compared_again() -> None:
    first, second, third = boards(3, {0})
    second.publish(64)
    third.publish(128)
    assert first.native.exchange(64) is False
    assert first.native.exchange(128) is False
    assert (first.calls, list(first._compared)) == (0, [0, 0, 0])
    with pytest.raises(UBRankMismatchError, match="rank 10: T = 128; rank 11: T = 64; rank 12: T = 128"):
        first.exchange(128)


def test_of_two_ranks_that_differ_at_the_same_moment_one_sees_it() -> None:
    """Two processes, each change at once on both; without a second look half of the differences are missed."""
    changes = 600
    made = on_threads(2, lambda group: RankBoard(group, slots=4096, settle_s=0.0, timeout_s=0.1))
    for board in made:
        board.use_native(native.load().Board)
    together = memoryview(mmap.mmap(-1, 64)).cast("q")
    seen = memoryview(mmap.mmap(-1, 16 * changes)).cast("q")
    child = os.fork()
    rank = int(child == 0)
    try:
        for change in range(changes):
            _meet(together, rank, 2 * change + 1)
            seen[2 * change + rank] = made[rank].native.exchange(8 + 8 * rank) is not True
            _meet(together, rank, 2 * change + 2)
            if made[rank].calls == change:  # not made, since the other was first
                made[rank].publish(8 + 8 * rank)
            for other in range(2):
                made[rank]._compared[other] = made[rank].calls  # forget it
    finally:
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)
    assert all(seen[2 * change] or seen[2 * change + 1] for change in range(changes))


def _meet(together: memoryview, rank: int, number: int) -> None:
    together[rank] = number
    end = time.monotonic() + 30
    while together[1 - rank] < number:
        assert time.monotonic() < end, "the other process has ended"

# SPDX-License-Identifier: Apache-2.0
"""The rank board between threads that play ranks: what is found, when, and what its text says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ub_dynamic.board import _HEADER, RankBoard
from ub_dynamic.errors import UBRankMismatchError, UBTimeoutError, UBUnsupportedError
from ub_dynamic.groups import SoloGroup
from ub_dynamic.testing.thread_group import ThreadGroup, on_threads


def boards(size: int = 3, slots: int = 8) -> list[RankBoard]:
    made: list[RankBoard] = on_threads(size, lambda group: RankBoard(group, slots, settle_s=0.01, timeout_s=0.1))
    assert all(isinstance(board, RankBoard) for board in made), made
    return made


def test_agreement_is_silent_and_nobody_waits() -> None:
    first, second, third = boards()
    for tokens in range(1, 30):
        for board in (first, second, third):
            board.publish(tokens)
            board.check()


def test_a_change_that_is_counted_and_not_visible_yet_is_compared_later() -> None:
    first, second = boards(size=2)
    first.publish(64)
    second.publish(32)
    words, record = first._words, second._own + _HEADER + 1
    theirs, words[record] = words[record], 0  # as a processor shows it that reorders the two writes
    first.check()
    words[record] = theirs
    with pytest.raises(UBRankMismatchError, match="shape change 1: rank 10: T = 64; rank 11: T = 32"):
        first.check()


def test_a_difference_is_found_by_whoever_comes_later_and_then_by_all() -> None:
    first, second, third = boards()
    first.publish(64)
    first.check()
    second.publish(32)
    with pytest.raises(
        UBRankMismatchError, match="shape change 1: rank 10: T = 64; rank 11: T = 32; rank 12: 0 changes"
    ):
        second.check()
    with pytest.raises(UBRankMismatchError, match="rank 10: T = 64; rank 11: T = 32"):
        first.check()
    third.publish(64)
    with pytest.raises(UBRankMismatchError, match="rank 10: T = 64; rank 11: T = 32; rank 12: T = 64"):
        third.check()


def test_a_skipped_call_shows_as_a_difference() -> None:
    first, second = boards(2)
    for tokens in (8, 16, 24):
        first.publish(tokens)
    for tokens in (8, 24):
        second.publish(tokens)
    with pytest.raises(UBRankMismatchError, match="shape change 2.*T = 16.*T = 24.*skipped a call"):
        second.check()


def test_a_rank_that_is_left_behind_is_named_by_both_sides() -> None:
    first, second = boards(2, slots=8)
    second.publish(4)
    for _ in range(6):
        first.publish(4)
    with pytest.raises(UBRankMismatchError, match=r"rank\(s\) \[11\] are more than 2 shape changes behind.*0.1 s"):
        first.check()
    for _ in range(20):
        first.publish(4)
    second.publish(4)
    with pytest.raises(UBRankMismatchError, match="behind rank 10"):
        second.check()


def test_a_rank_far_ahead_waits_for_the_others() -> None:
    def run(group: ThreadGroup) -> int:
        board = RankBoard(group, slots=8)
        for tokens in range(1, 200):
            if group.rank and tokens % 50 == 0:
                time.sleep(0.05)
            board.publish(tokens)
            board.check()
        return board.calls

    assert on_threads(3, run) == [199, 199, 199]


def test_records_wrap_around() -> None:
    first, second = boards(2, slots=8)
    for tokens in range(1, 100):
        first.publish(tokens)
        first.check()
        second.publish(tokens)
        second.check()


def test_the_strict_wait_returns_when_all_have_come() -> None:
    def run(group: ThreadGroup) -> int:
        board = RankBoard(group)
        for tokens in (8, 16, 8):
            board.publish(tokens)
            board.wait_for_all(20)
        return board.calls

    assert on_threads(3, run) == [3, 3, 3]


def test_the_strict_wait_names_who_is_missing() -> None:
    first, second, _ = boards()
    first.publish(8)
    second.publish(8)
    with pytest.raises(UBTimeoutError, match=r"waited 0.05 s: rank\(s\) \[12\] did not make shape change 1"):
        first.wait_for_all(0.05)


def test_the_final_check_compares_the_number_of_changes() -> None:
    def run(group: ThreadGroup) -> None:
        board = RankBoard(group)
        for _ in range(2 if group.rank else 1):
            board.publish(8)
        board.final_check()

    results = on_threads(2, run)
    assert all(isinstance(result, UBRankMismatchError) for result in results)
    assert all("rank 10: T = 8 (change 1); rank 11: T = 8 (change 2)" in str(result) for result in results)


def test_the_final_check_does_not_wait_for_the_dead() -> None:
    first, second = boards(2)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    second._words[second._own + 1] = child.pid
    with pytest.raises(UBTimeoutError, match=r"rank\(s\) \[11\] ended before the last comparison"):
        first.final_check()


def test_no_file_is_left_while_the_board_is_open() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no /dev/shm here")
    made = boards()
    assert made and not list(shared.glob("ub_dynamic_*"))


def test_ranks_on_several_hosts_cannot_share_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["a", "b"])
    monkeypatch.setattr("ub_dynamic.board.socket.gethostname", lambda: next(names))
    results = on_threads(2, RankBoard)
    assert all(isinstance(result, UBUnsupportedError) and 'check="never"' in str(result) for result in results)


def test_dead_ranks_are_seen() -> None:
    first, second = boards(2)
    assert first.dead_ranks() == []
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    second._words[second._own + 1] = child.pid
    assert first.dead_ranks() == []
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: ended, not collected
    assert first.dead_ranks() == [11]
    child.wait()
    assert first.dead_ranks() == [11]


def test_a_rank_that_does_not_come_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Late(SoloGroup):
        def allgather(self, value: object, what: str) -> list[object]:
            if what == "naming the rank board":
                assert Path(str(value)).exists()
                raise UBTimeoutError(what)
            return [value]

    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(UBTimeoutError):
        RankBoard(Late())
    assert not list(tmp_path.iterdir())


def test_a_change_of_one_communicator_says_which() -> None:
    first, second = boards(2)
    for board in (first, second):
        board.name_communicators(("fc1_fprop", "fc2_fprop"), 4096)
        board.exchange(4096)
        board.exchange(64, 2)
    first.exchange(64, 1)
    with pytest.raises(
        UBRankMismatchError, match="change 3: rank 10: T = 64 of fc1_fprop; rank 11: T = 64 of fc2_fprop"
    ):
        second.exchange(64, 2)
    third, fourth = boards(2)
    third.exchange(64)
    with pytest.raises(UBRankMismatchError, match="rank 10: T = 64; rank 11: T = 64 of communicator 1"):
        fourth.exchange(64, 1)


def test_a_record_has_room_for_so_many() -> None:
    (board,) = boards(1)
    board.name_communicators(["name"] * 63, (1 << 26) - 1)
    for names, tokens in ((64, 8), (1, 1 << 26)):
        with pytest.raises(UBUnsupportedError, match='room for 63 communicators and T up to 67108863.*check="never"'):
            board.name_communicators(["name"] * names, tokens)


def test_native_code_gets_the_communicator_with_t() -> None:
    first, second = boards(2)
    first.name_communicators(("fc1_fprop",), 64)

    class Native:
        def exchange(self, tokens: int) -> bool:
            RankBoard.publish(first, tokens)  # as the native code writes it: one number in the lower half
            return False

    first.use_native(lambda *_: Native())
    second.publish(64)
    with pytest.raises(UBRankMismatchError, match="rank 10: T = 64 of fc1_fprop; rank 11: T = 64"):
        first.exchange(64, 1)

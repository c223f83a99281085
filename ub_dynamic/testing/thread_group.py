# SPDX-License-Identifier: Apache-2.0
"""Threads of one process as the ranks of a group, to test what ranks do together without starting any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ThreadGroup:
    """What :class:`ub_dynamic.groups.Group` asks for; the world ranks are 10, 11, ..."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.members = rank, size, tuple(range(10, 10 + size))
        self._values, self._barrier = board, barrier

    def allgather(self, value: Any, what: str) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(20)
        values = list(self._values)
        self._barrier.wait(20)
        return values

    def barrier(self, what: str) -> None:
        self._barrier.wait(20)


def on_threads(size: int, function: Callable[[ThreadGroup], Any]) -> list[Any]:
    """``function(group)`` on every rank at once; what each returned, or the exception that ended it."""
    values: list[Any] = [None] * size
    results: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadGroup(rank, size, values, barrier))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results

# SPDX-License-Identifier: Apache-2.0
"""What each rank is doing: every operation is written down in memory that the TP group shares.

Overlap operations are collective: the n-th of one rank must be the n-th of every rank, on the same
communicator with the same T. Each rank writes ``(number, communicator, T)`` when it starts one and compares
with what the others have written so far, without waiting. So a rank with another T, a rank that skipped a
call and a rank that gave up are found while the others wait for a message that will never come.

A record is one aligned 8-byte word, so that a reader never sees half of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ...board import is_alive, shared_file
from ...errors import UBRankMismatchError
from ...groups import Group

_LATEST, _PID, _FAILED, _HEADER = 0, 1, 2, 3  # words a rank, before its records
_SLOTS = 64  # records a rank; ranks are one operation apart, since each needs messages of the others
_NUMBER_BITS, _INDEX_BITS, _TOKEN_BITS = 24, 6, 32
_SETTLE_S = 1.0  # what a rank that found a mismatch waits for the others to come to that operation

MAX_NAMES = 1 << _INDEX_BITS


class OperationLog:
    """One rank's view. ``names``: what an operation can be on, by index, the same on every rank."""

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        self.rank, self.size, self.members = group.rank, group.size, group.members
        self._names = tuple(names)
        self._stride = _HEADER + _SLOTS
        self._words = memoryview(shared_file(group, self.size * self._stride * 8)).cast("q")
        self._own = self.rank * self._stride
        self._others = tuple(rank for rank in range(self.size) if rank != self.rank)
        self._number = 0
        self._words[self._own + _PID] = os.getpid()
        group.barrier("opening the operation log")

    def start(self, index: int, tokens: int) -> int:
        """Write down this rank's next operation, compare, and return its number (from 1)."""
        number = self._number = self._number + 1
        words, own = self._words, self._own
        words[own + _HEADER + number % _SLOTS] = _record(number, index, tokens)
        words[own + _LATEST] = number
        self.check()
        return number

    def check(self) -> None:
        """Compare this rank's latest operation with those of the others that have come to the same number.

        Raises :class:`UBRankMismatchError` naming every rank's operation and T.
        """
        number = self._number
        if not number:
            return
        slot = _HEADER + number % _SLOTS
        own = self._words[self._own + slot]
        for rank in self._others:
            base = rank * self._stride
            if self._words[base] >= number and self._words[base + slot] != own:
                self._settle(number)
                raise UBRankMismatchError(
                    f"TP ranks disagree in overlap operation {number}: {self.describe(number)}. "
                    "Either T differs between the ranks, or a rank skipped a call"
                )

    def describe(self, number: int | None = None) -> str:
        """Every rank's operation of that number, or its latest one, as text."""
        return "; ".join(f"rank {self.members[rank]}: {self._text(rank, number)}" for rank in range(self.size))

    def behind(self) -> list[int]:
        """World ranks that have not come to this rank's latest operation."""
        return [self.members[rank] for rank in self._others if self._words[rank * self._stride] < self._number]

    def mark_failed(self) -> None:
        """Tell the others that this rank has given up."""
        self._words[self._own + _FAILED] = self._number + 1

    def failed_ranks(self) -> list[int]:
        """World ranks that have given up."""
        return [self.members[rank] for rank in self._others if self._words[rank * self._stride + _FAILED]]

    def dead_ranks(self) -> list[int]:
        """World ranks whose process has ended."""
        return [self.members[rank] for rank in self._others if not is_alive(self._words[rank * self._stride + _PID])]

    def _settle(self, number: int) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while self.behind() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _text(self, rank: int, number: int | None) -> str:
        base = rank * self._stride
        latest = self._words[base]
        wanted = latest if number is None else number
        record = self._words[base + _HEADER + wanted % _SLOTS]
        if not wanted or latest < wanted or record >> (_INDEX_BITS + _TOKEN_BITS) != wanted % (1 << _NUMBER_BITS):
            return f"{latest} operations so far"
        name = self._names[record >> _TOKEN_BITS & MAX_NAMES - 1]
        tokens = record & (1 << _TOKEN_BITS) - 1
        text = f"{name} with T = {tokens}" if tokens else name
        if number is None:
            text += f" (operation {latest})"
        return text + (", gave up" if self._words[base + _FAILED] else "")


def _record(number: int, index: int, tokens: int) -> int:
    tokens &= (1 << _TOKEN_BITS) - 1
    return ((number % (1 << _NUMBER_BITS)) << _INDEX_BITS | index) << _TOKEN_BITS | tokens

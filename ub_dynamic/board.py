# SPDX-License-Identifier: Apache-2.0
"""A board on which each rank of a TP group writes its shape changes, and reads those of the others.

Ranks that disagree on T do not hang in TE's kernels, they corrupt each other's buffers silently. A
collective per change would find it but costs a wait, so each rank publishes ``(change number, T)`` in
memory that all ranks of the host share, and compares what the others have published so far. Nobody
waits for anybody, except in :meth:`RankBoard.wait_for_all`.

The memory is a file that is unlinked as soon as every rank has opened it: nothing is left behind,
however a rank ends. One record is one aligned 8-byte word (change number in the upper half; in the lower the
index of the communicator, 0 for all of them, in 6 bits, and T in 26), so that a reader never sees half of it.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import UBRankMismatchError, UBTimeoutError, UBUnsupportedError
from .groups import Group, timeout_seconds

_HEADER = 2  # words a rank: latest change number, process id
_MASK = (1 << 32) - 1
_TOKEN_BITS, _INDEX_BITS = 26, 6
_TOKENS = (1 << _TOKEN_BITS) - 1


class RankBoard:
    """One rank's view of the board.

    ``slots``: records a rank; it waits when it is a quarter of them ahead of another rank, at most ``timeout_s``.
    ``settle_s``: seconds that an error waits for the other ranks to reach the change in question, so that its
    text can name every rank's T.
    """

    def __init__(self, group: Group, slots: int = 4096, settle_s: float = 1.0, timeout_s: float | None = None) -> None:
        self._group = group
        self.rank, self.size, self.members = group.rank, group.size, group.members
        self._slots, self._settle_s = slots, settle_s
        self._ahead = slots // 4  # a rank may lag this much in comparing, too: half is not enough
        self._timeout_s = timeout_seconds(timeout_s)
        self._stride = _HEADER + slots
        self._words = memoryview(shared_file(group, self.size * self._stride * 8)).cast("q")
        self._own = self.rank * self._stride
        self._others = tuple((rank, rank * self._stride) for rank in range(self.size) if rank != self.rank)
        self._compared = array("q", [0] * self.size)  # per rank: up to which change it was compared with ours
        self._names: tuple[str, ...] = ()
        self.native: Any = None  # of use_native
        self._fast: Callable[[int], bool | None] | None = None
        self._words[self._own + 1] = os.getpid()
        group.barrier("opening the rank board")

    @property
    def calls(self) -> int:
        """Shape changes that this rank has published."""
        return self._words[self._own]

    def name_communicators(self, names: Sequence[str], max_tokens: int) -> None:
        """What the index of a change of one communicator, from 1 on, stands for; the same on every rank.

        Raises :class:`UBUnsupportedError` where a record has no room for as many, or for T up to ``max_tokens``.
        """
        if len(names) >= 1 << _INDEX_BITS or max_tokens > _TOKENS:
            raise UBUnsupportedError(
                f"the rank board has room for {(1 << _INDEX_BITS) - 1} communicators and T up to {_TOKENS}, not for "
                f'{len(names)} and {max_tokens}: pass check="never"'
            )
        self._names = tuple(names)

    def exchange(self, tokens: int, communicator: int = 0) -> None:
        """:meth:`publish` and :meth:`check` in one call."""
        made = self._fast(communicator << _TOKEN_BITS | tokens if communicator else tokens) if self._fast else False
        if made:
            return
        if made is False:
            self.publish(tokens, communicator)
        self.check()

    def use_native(self, make: Callable[..., Any]) -> None:
        """Let native code do :meth:`exchange` while all is well.

        ``make(words, compared, rank, size, slots, ahead)`` returns an object whose ``exchange(tokens)`` answers True:
        published and agreed, False: there is something to look at, and nothing was done, or None: published, and there
        is something to look at. It works on this board's own memory.
        """
        self.native = make(self._words, self._compared, self.rank, self.size, self._slots, self._ahead)
        self._fast = self.native.exchange

    def publish(self, tokens: int, communicator: int = 0) -> None:
        """Write this rank's next change, of all communicators or of one (by index, from 1); no wait, no check."""
        words, own = self._words, self._own
        calls = words[own] + 1
        words[own + _HEADER + calls % self._slots] = calls << 32 | communicator << _TOKEN_BITS | tokens
        words[own] = calls

    def check(self) -> None:
        """Compare with what the others have published so far.

        Raises :class:`UBRankMismatchError` naming every rank's T if a change differs, or naming the ranks
        that stay so far behind that they must have skipped calls.
        """
        words, compared = self._words, self._compared
        calls = words[self._own]
        for rank, base in self._others:
            common = words[base]
            if common > calls:
                common = calls
            if calls - common > self._ahead:
                self._let_catch_up()
            if compared[rank] != common:
                self._compare(rank, base, common)

    def _let_catch_up(self) -> None:
        # Only a rank that does nothing but change shapes gets this far ahead. It waits, so that no record is
        # overwritten before the others have compared it.
        missing = self._behind(self.calls - self._ahead, self._timeout_s)
        if missing:
            names = [self.members[rank] for rank in missing]
            raise UBRankMismatchError(
                f"rank(s) {names} are more than {self._ahead} shape changes behind and did not come closer in "
                f"{self._timeout_s:g} s; they skip calls or hang. {self.describe()}"
            )

    def _compare(self, rank: int, base: int, common: int) -> None:
        for call in range(self._compared[rank] + 1, common + 1):
            theirs = self._words[base + _HEADER + call % self._slots]
            ours = self._words[self._own + _HEADER + call % self._slots]
            if theirs == ours:
                continue
            if theirs >> 32 < call:  # counted, and not visible here yet: processors may reorder the two
                self._compared[rank] = call - 1
                return
            if theirs >> 32 > call:
                raise UBRankMismatchError(
                    f"this rank is {(theirs >> 32) - call} shape changes behind rank {self.members[rank]}; "
                    "it skips calls. "
                    f"{self.describe(call)}"
                )
            self._behind(call, self._settle_s)
            raise UBRankMismatchError(
                f"TP ranks disagree in shape change {call}: {self.describe(call)}. Either T differs between the "
                "ranks, or a rank skipped a call"
            )
        self._compared[rank] = common

    def wait_for_all(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has published as many changes as this one, then :meth:`check`.

        Raises :class:`UBTimeoutError` naming the ranks that have not come.
        """
        limit = timeout_seconds(timeout_s)
        missing = self._behind(self.calls, limit)
        self.check()
        if missing:
            names, dead = [self.members[rank] for rank in missing], self.dead_ranks()
            how = f"rank(s) {dead} ended" if dead else f"waited {limit:g} s"
            raise UBTimeoutError(f"{how}: rank(s) {names} did not make shape change {self.calls}. {self.describe()}")

    def _behind(self, call: int, timeout_s: float) -> list[int]:
        """Wait for every rank to reach change ``call``; the ranks that did not, in time or because they ended."""
        deadline = time.monotonic() + timeout_s
        pause = 0.0
        while missing := [rank for rank, base in self._others if self._words[base] < call]:
            if time.monotonic() > deadline or (pause and self.dead_ranks()):
                break
            time.sleep(pause)
            pause = min(0.001, pause + 0.00001)
        return missing

    def final_check(self) -> None:
        """At the end of the group's work: every rank has made the same changes. All ranks call it together.

        Raises :class:`UBRankMismatchError` on every rank if their T or their number of changes differ,
        :class:`UBTimeoutError` naming a rank that has ended.
        """
        if dead := self.dead_ranks():
            raise UBTimeoutError(f"rank(s) {dead} ended before the last comparison of shapes. {self.describe()}")
        counts = self._group.allgather(self.calls, "comparing the number of shape changes")
        self.check()
        if len(set(counts)) > 1:
            raise UBRankMismatchError(f"TP ranks made different numbers of shape changes: {self.describe()}")

    def describe(self, call: int | None = None) -> str:
        """Every rank's T in change ``call``, or its latest one, as text."""
        parts = []
        for rank in range(self.size):
            base = rank * self._stride
            latest = self._words[base]
            wanted = latest if call is None else call
            record = self._words[base + _HEADER + wanted % self._slots]
            if latest < wanted or not latest or record >> 32 != wanted:
                parts.append(f"rank {self.members[rank]}: {latest} changes so far")
            elif call is None:
                parts.append(f"rank {self.members[rank]}: {self._change(record)} (change {latest})")
            else:
                parts.append(f"rank {self.members[rank]}: {self._change(record)}")
        return "; ".join(parts)

    def _change(self, record: int) -> str:
        tokens, index = record & _TOKENS, (record & _MASK) >> _TOKEN_BITS
        if not index:
            return f"T = {tokens}"
        return f"T = {tokens} of {self._names[index - 1] if index <= len(self._names) else f'communicator {index}'}"

    def dead_ranks(self) -> list[int]:
        """World ranks whose process has ended (same host only, which is all that a board spans)."""
        return [self.members[rank] for rank, base in self._others if not is_alive(self._words[base + 1])]


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not, and 0 stands for one that has not said who it is."""
    if pid == 0:
        return True  # has not opened the board yet
    try:
        # A killed process whose launcher has not collected it yet still exists, as a zombie.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def shared_file(group: Group, nbytes: int) -> mmap.mmap:
    """Zeroed memory that all ranks of ``group`` share; its file has no name any more when this returns."""
    hosts = set(group.allgather(socket.gethostname(), "naming the hosts of the rank board"))
    if len(hosts) > 1:
        raise UBUnsupportedError(
            f"the TP group spans the hosts {sorted(hosts)}; its ranks share no memory to compare shapes in: "
            'pass check="never"'
        )
    made, failure = None, None
    if group.rank == 0:
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        descriptor, made = tempfile.mkstemp(prefix="ub_dynamic_", dir=folder)
        os.ftruncate(descriptor, nbytes)
        os.close(descriptor)
    try:
        name = group.allgather(made, "naming the rank board")[0]
        try:
            descriptor = os.open(name, os.O_RDWR)
        except OSError as error:
            failure = f"rank {group.members[group.rank]}: {error}"
        failures = [text for text in group.allgather(failure, "opening the rank board") if text]
    finally:
        if made is not None:
            os.unlink(made)
    if failures:
        raise UBUnsupportedError(f'the TP ranks cannot share {name} ({"; ".join(failures)}): pass check="never"')
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)

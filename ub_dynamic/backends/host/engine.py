# SPDX-License-Identifier: Apache-2.0
"""What all communicators of a process share: numbered operations, timed waits, and the first error.

An operation that fails leaves messages under way, so nothing that comes later could be trusted: the engine
keeps the first error and raises it again from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from ...board import RankBoard
from ...errors import UBDynamicError, UBRankMismatchError, UBStateError, UBTimeoutError
from ...groups import Group, timeout_seconds
from . import trace
from .oplog import MAX_NAMES, OperationLog
from .progress import Cancelled, Move, ProgressThread, Transfer
from .transport import MessageSizeError, PeerLostError, create_transport

_SLICE_S = 0.02  # a waiting rank looks at the others this often
_DEAD_GRACE_S = 0.25  # what a rank that has ended sent before may still be on its way
_SETTLE_S = 1.0  # the other side of a wrong message size has at most this long to write down its T
_PLAIN, _DESTROY = "a collective without overlap", "destroy_ub"


class Engine:
    """``names``: the communicators, in the same order on every rank. Collective over ``group``."""

    def __init__(
        self,
        group: Group,
        names: Sequence[str],
        board: RankBoard | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.timeout_s = timeout_seconds(timeout_s)
        self._board = board
        self.failure: BaseException | None = None
        self.filled: set[str] = set()  # communicators between copy_into_buffer and the operation that uses it
        self._open, self._owner = 0, 0  # operations under way, and the thread that they belong to
        self._lock = threading.Lock()
        everything = (*names, _PLAIN, _DESTROY)
        if len(everything) > MAX_NAMES:
            raise UBStateError(f"{len(names)} communicators; at most {MAX_NAMES - 2} are possible")
        self._index = {name: i for i, name in enumerate(everything)}
        self._log = OperationLog(group, everything)
        self._transport = create_transport(group, self.timeout_s)
        self._sequence_bits = self._transport.tag_bits - MAX_NAMES.bit_length()
        self._progress = ProgressThread(self._transport)

    def operation(self, what: str, name: str | None, tokens: int) -> Operation:
        """The next operation of this rank; use it in a ``with`` statement. ``name`` None, or one that no communicator
        has: on none.

        Raises the first error of an earlier operation, :class:`UBStateError` from a second thread in the
        middle of another operation, :class:`UBRankMismatchError` where the ranks disagree.
        """
        return Operation(self, what, name if name and name in self._index else _PLAIN, tokens)

    def busy(self) -> str | None:
        """Why no shape may change now, or None."""
        if self._open:
            return "an overlap operation is under way"
        if self.filled:
            return f"filled buffers wait for their operation: {', '.join(sorted(self.filled))}"
        return None

    def check_thread(self, name: str) -> None:
        """Raise :class:`UBStateError` if another thread is in the middle of an operation."""
        if self._open and self._owner != threading.get_ident():
            raise UBStateError(f"{name}: another thread is in the middle of an overlap operation")

    def close(self) -> None:
        """End the progress thread and the transport. Collective; after a failure it waits for nobody."""
        try:
            if self.failure is None:
                self._log.start(self._index[_DESTROY], 0)
                self.group.barrier(_DESTROY)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            ended = self._progress.stop(self.timeout_s if self.failure is None else 1.0)
        if self.failure is None and ended:
            self._transport.close()

    # -- used by Operation -----------------------------------------------------------------------------------

    def begin(self, name: str, tokens: int) -> int:
        """Number and register one operation; its tag for messages."""
        if self.failure is not None:
            self._raise_again()
        index = self._index[name]
        with self._lock:
            self.check_thread(name)
            self._owner = threading.get_ident()
            self._open += 1
            self.filled.discard(name)
            try:
                number = self._log.start(index, tokens)
            except BaseException as error:
                self._open -= 1
                self.fail(error)
                raise
        return (number % (1 << self._sequence_bits)) * MAX_NAMES + index

    def end(self, error: BaseException | None) -> None:
        with self._lock:
            self._open -= 1
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Keep the first error, tell the others, and let the progress thread give up."""
        if self.failure is None:
            self.failure = error
            self._log.mark_failed()
            self._progress.cancel()

    def submit(self, transfer: Transfer) -> None:
        self._progress.submit(transfer)

    def wait(self, transfer: Transfer) -> None:
        """Return when ``transfer`` has ended well.

        Raises :class:`UBTimeoutError` or :class:`UBRankMismatchError` naming the ranks and the operation.
        """
        if not transfer.done.is_set():
            begin = trace.now()
            self._watch(transfer)
            if (tracer := trace.active()) is not None:
                tracer.add(trace.WAIT, transfer.label, begin)
        if transfer.error is not None:
            self._explain(transfer, transfer.error)

    def _watch(self, transfer: Transfer) -> None:
        """Until ``transfer`` has ended, look at the others again and again."""
        begin = time.monotonic()
        dead_since = None
        while not transfer.done.wait(_SLICE_S):
            waited = time.monotonic() - begin
            self._compare()
            dead = self._log.dead_ranks()
            dead_since = (dead_since or waited) if dead else None
            if dead_since is not None and waited - dead_since > _DEAD_GRACE_S:
                self._give_up(transfer, f"the process of rank(s) {dead} has ended")
            if failed := self._log.failed_ranks():
                self._give_up(transfer, f"rank(s) {failed} gave up")
            if waited > self.timeout_s:
                late = self._log.behind() or "none; all have started this operation"
                waits = f"waited {self.timeout_s:g} s (UB_DYNAMIC_TIMEOUT sets this)"
                self._give_up(transfer, f"{waits}, ranks that have not come: {late}")

    def _compare(self) -> None:
        self._log.check()
        if self._board is not None:
            self._board.check()

    def _explain(self, transfer: Transfer, error: BaseException) -> NoReturn:
        """Raise what lies behind a transfer's error, once the others' log and processes show it."""
        if isinstance(error, Cancelled) and self.failure is not None:
            self._raise_again()
        deadline = time.monotonic() + _SETTLE_S
        while True:
            self._compare()
            dead = self._log.dead_ranks()
            shown = dead if isinstance(error, PeerLostError) else not self._log.behind()
            if shown or time.monotonic() > deadline:
                break
            time.sleep(_SLICE_S)
        if isinstance(error, MessageSizeError):
            raise UBRankMismatchError(
                f"{transfer.label}: rank {self._world(error.peer)} sent {error}. {self._log.describe()}"
            ) from error
        if dead:
            self._give_up(transfer, f"the process of rank(s) {dead} has ended")
        if isinstance(error, PeerLostError):
            self._give_up(transfer, f"the connection to rank {self._world(error.peer)} was lost ({error})")
        self._give_up(transfer, f"{type(error).__name__}: {error}")

    def _give_up(self, transfer: Transfer, reason: str) -> NoReturn:
        me = self.group.members[self.rank]
        sources = [self.group.members[peer] for _, peer in transfer.receives]
        raise UBTimeoutError(f"rank {me}, {transfer.label} (from rank(s) {sources}): {reason}. {self._log.describe()}")

    def _raise_again(self) -> NoReturn:
        error = self.failure
        assert error is not None
        text = f"an earlier operation failed, and the ranks are out of step since: {error}"
        raise (type(error) if isinstance(error, UBDynamicError) else UBStateError)(text) from error

    def _world(self, peer: int) -> int:
        return self.group.members[peer]


class Operation:
    """One collective operation under way, from ``with`` to the end of its body."""

    def __init__(self, engine: Engine, what: str, name: str, tokens: int) -> None:
        self._engine = engine
        self._label = f"{what} on {name}" if name != _PLAIN else what
        self._name, self._tokens = name, tokens
        self._tag = 0

    def __enter__(self) -> Operation:
        self._tag = self._engine.begin(self._name, self._tokens)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, GeneratorExit):
            error = UBStateError(f"{self._label} was left before its end")
        self._engine.end(error)

    def transfer(self, step: str, sends: Sequence[Move], receives: Sequence[Move]) -> Transfer:
        """Give one step to the progress thread."""
        transfer = Transfer(f"{self._label}, {step}", self._tag, sends, receives)
        self._engine.submit(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Until that step has ended; errors as :meth:`Engine.wait`."""
        self._engine.wait(transfer)

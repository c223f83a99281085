# SPDX-License-Identifier: Apache-2.0
"""The progress thread: it moves chunks, one transfer after the other, while the main thread multiplies.

Transfers run in the order in which they are submitted, and one starts only when the one before it has ended.
So a ring can be submitted as a whole: what step i + 1 sends is what step i received. torch's GEMMs release
the GIL, and so does this thread whenever it waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from . import trace
from .buffers import Region
from .transport import Transport

Move = tuple[Region, int]  # what, and the rank in the group that it goes to or comes from


class Transfer:
    """Some messages that together make one step. ``label`` says what it is, for errors and traces.

    ``error`` is set before ``done`` if it failed.
    """

    __slots__ = ("done", "error", "label", "receives", "sends", "tag")

    def __init__(self, label: str, tag: int, sends: Sequence[Move], receives: Sequence[Move]) -> None:
        self.label, self.tag, self.sends, self.receives = label, tag, sends, receives
        self.done = threading.Event()
        self.error: BaseException | None = None


class Cancelled(Exception):
    """An earlier transfer failed, so this one was not made."""


class ProgressThread:
    """A daemon thread, started at once, that ends with :meth:`stop`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ub_dynamic progress", daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        self._queue.put(transfer)

    def cancel(self) -> None:
        """Give up the transfer under way and all later ones."""
        self._cancelled.set()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after what it has been given; whether it ended in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            try:
                self._move(transfer)
            except BaseException as error:
                transfer.error = error
                self._cancelled.set()
            transfer.done.set()

    def _move(self, transfer: Transfer) -> None:
        if self._cancelled.is_set():
            raise Cancelled
        tracer, begin = trace.active(), trace.now()
        transport, tag = self._transport, transfer.tag
        requests = [transport.receive(region.data, peer, tag) for region, peer in transfer.receives]
        requests += [transport.send(region.data, peer, tag) for region, peer in transfer.sends]
        if not transport.finish(requests, self._cancelled.is_set):
            raise Cancelled
        if tracer is not None:
            nbytes = sum(len(region.data) for region, _ in transfer.sends)
            tracer.add(trace.TRANSFER, transfer.label, begin, nbytes)

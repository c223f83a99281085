# SPDX-License-Identifier: Apache-2.0
"""How tensors go from a rank to its neighbour: gloo between hosts, NCCL between devices, a hand-over at pp 1.

A *channel* is one direction of one edge of the ring of ranks, a strict first-in first-out of messages. Headers
always go through gloo, so that the host can read them without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import UBStateError, UBTimeoutError, UBUnsupportedError
from .headers import Direction

MAX_PARTS = 255  # tensors of one message, the header included


class Work(Protocol):
    """A transfer under way. ``wait`` raises :class:`UBTimeoutError` that begins with ``what`` if it does not end."""

    def wait(self, what: str) -> None: ...


class Wire(Protocol):
    """Moves the tensors of message number ``serial`` of a channel to or from ``peer`` (a rank of the pipeline).

    ``together``: what is sent and received in one round of the schedule goes at :meth:`launch`, and not before.
    """

    together: bool

    def send(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work: ...

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work: ...

    def launch(self) -> None: ...

    def close(self) -> None: ...


class HostWire:
    """Tensors in host memory, over gloo.

    The tag holds the message's number and the tensor's place in it, so that a lost tensor is never replaced by
    the next one: gloo takes a shorter one without an error. A receive of the wrong size cannot be taken back, so
    it waits for the header.
    """

    together = False

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], timeout_s: float, first_part: int) -> None:
        self._group, self._members = group, members
        self._timeout_s, self._first_part = timeout_s, first_part

    def send(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return self._post(dist.isend, tensors, peer, direction, serial)

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return self._post(dist.irecv, tensors, peer, direction, serial)

    def launch(self) -> None:
        pass  # every send has gone

    def close(self) -> None:
        pass  # the group belongs to whoever made it

    def _post(
        self,
        operation: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        peer: int,
        direction: Direction,
        serial: int,
    ) -> Work:
        base = (((serial % (1 << 21)) << 1 | (direction == "backward")) << 8) + self._first_part
        works: list[dist.Work] = []
        broken = None
        try:
            for part, tensor in enumerate(tensors):
                works.append(operation(tensor, self._members[peer], self._group, base + part))
        except RuntimeError as error:  # the connection has ended: whoever waits for this says so
            broken = error
        return _HostWork(works, broken, self._timeout_s)


class _HostWork:
    def __init__(self, works: Sequence[dist.Work], broken: RuntimeError | None, timeout_s: float) -> None:
        self._works, self._broken, self._timeout_s = works, broken, timeout_s

    def wait(self, what: str) -> None:
        try:
            if self._broken:
                raise self._broken
            for work in self._works:
                work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise _ended(what, error, self._timeout_s) from error


def _ended(what: str, error: RuntimeError, timeout_s: float) -> UBTimeoutError:
    """What torch's error of a transfer means."""
    how = f"no answer within {timeout_s:g} s" if "imed out" in str(error) else "the connection ended"
    return UBTimeoutError(f"{what}: {how} (UB_DYNAMIC_TIMEOUT sets the wait in seconds, if a stage may take longer)")


class NcclWire:
    """Tensors in device memory, over NCCL: all that a round of the schedule sends and receives in one kernel.

    NCCL's kernels wait on the device for their peers. With ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which TP overlap is run
    with, all streams of a process share one hardware queue, and the event behind a kernel that waits holds up
    whatever was enqueued after it: a receive that is posted ahead keeps back the very pass that its sender waits for,
    and two messages that cross, in a kernel each, keep back each other. In one kernel they progress together (NCCL's
    user guide, group calls), and both ends of a message are in the same round, so that no kernel waits for a later
    one (:mod:`~ub_dynamic.pipeline.rounds`). ``wait`` makes the current stream wait, not the host; a device that never
    answers is ended by NCCL's own watchdog after ``timeout_s``. ``backend``: another one of torch.distributed, for
    tests.
    """

    together = True

    def __init__(
        self,
        pipelines: Sequence[tuple[int, ...]],
        members: Sequence[int],
        rank: int,
        device: torch.device,
        timeout_s: float,
        backend: str = "nccl",
    ) -> None:
        if backend == "nccl" and not dist.is_nccl_available():
            raise UBUnsupportedError(f"device {device} needs torch.distributed with NCCL; this torch has none")
        self._members, self._timeout_s = members, timeout_s
        self._batch = _Batch(timeout_s)
        self._group: dist.ProcessGroup | None = None
        for ranks in pipelines:
            made = dist.new_group(list(ranks), timedelta(seconds=timeout_s), backend)  # every rank makes all
            if ranks == members:
                self._group = made
        self._set_up(rank, device)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return self._add(dist.isend, tensors, peer)

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return self._add(dist.irecv, tensors, peer)

    def launch(self) -> None:
        self._batch.launch()
        self._batch = _Batch(self._timeout_s)

    def close(self) -> None:
        self._batch = _Batch(self._timeout_s)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _set_up(self, rank: int, device: torch.device) -> None:
        """The first use of a connection sets it up and synchronises; no later transfer does."""
        size = len(self._members)
        for step in (1, -1):
            self._add(dist.isend, [torch.zeros(1, device=device)], (rank + step) % size)
            self._add(dist.irecv, [torch.zeros(1, device=device)], (rank - step) % size)
        batch = self._batch
        self.launch()
        batch.wait("set-up")

    def _add(self, operation: Callable[..., Any], tensors: Sequence[torch.Tensor], peer: int) -> _Batch:
        rank = self._members[peer]
        self._batch.operations += [dist.P2POp(operation, tensor, rank, self._group) for tensor in tensors]
        return self._batch


class _Batch:
    """Sends and receives of one kernel."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.operations: list[dist.P2POp] = []
        self._works: list[dist.Work] | None = None

    def launch(self) -> None:
        self._works = dist.batch_isend_irecv(self.operations) if self.operations else []
        self.operations = []

    def wait(self, what: str) -> None:
        if self._works is None:
            raise UBStateError(f"{what}: its round has not been launched")
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _ended(what, error, self._timeout_s) from error


class LocalWire:
    """The next stage is on the same rank (pp 1): the receiver copies what the sender left."""

    together = False

    def __init__(self) -> None:
        self._left: dict[tuple[Direction, int], Sequence[torch.Tensor]] = {}

    def send(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        self._left[direction, serial] = tensors
        return _Done()

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return _HandOver(self._left, (direction, serial), tensors)

    def launch(self) -> None:
        pass

    def close(self) -> None:
        self._left.clear()


class _Done:
    def wait(self, what: str) -> None:
        pass


class _HandOver:
    def __init__(
        self,
        left: dict[tuple[Direction, int], Sequence[torch.Tensor]],
        key: tuple[Direction, int],
        targets: Sequence[torch.Tensor],
    ) -> None:
        self._left, self._key, self._targets = left, key, targets

    def wait(self, what: str) -> None:
        if self._key not in self._left:
            raise UBStateError(f"{what}: a schedule that wants it before it is made")
        for target, source in zip(self._targets, self._left.pop(self._key), strict=True):
            target.copy_(source)

# SPDX-License-Identifier: Apache-2.0
"""How tensors go from a rank to its neighbour: gloo between hosts, NCCL between devices, a hand-over at pp 1.

A *channel* is one direction of one edge of the ring of ranks, a strict first-in first-out of messages. Headers
always go through gloo, so that the host can read them without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
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

    ``early``: a receive may be posted before its header has been checked.
    """

    early: bool

    def send(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work: ...

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work: ...

    def close(self) -> None: ...


class HostWire:
    """Tensors in host memory, over gloo.

    The tag holds the message's number and the tensor's place in it, so that a lost tensor is never replaced by
    the next one: gloo takes a shorter one without an error. A receive of the wrong size cannot be taken back, so
    it waits for the header.
    """

    early = False

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], timeout_s: float, first_part: int) -> None:
        self._group, self._members = group, members
        self._timeout_s, self._first_part = timeout_s, first_part

    def send(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return self._post(dist.isend, tensors, peer, direction, serial)

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return self._post(dist.irecv, tensors, peer, direction, serial)

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
            late = "imed out" in str(error)
            how = f"no answer within {self._timeout_s:g} s" if late else "the connection ended"
            raise UBTimeoutError(
                f"{what}: {how} (UB_DYNAMIC_TIMEOUT sets the wait in seconds, if a stage may take longer)"
            ) from error


class NcclWire:
    """Tensors in device memory, over NCCL: a communicator of two ranks for each channel, all made at build time.

    Channels that shared a communicator would wait for each other. ``wait`` makes the current stream wait, not
    the host; a device that never answers is ended by NCCL's own watchdog after ``timeout_s``.
    """

    early = True

    def __init__(
        self,
        pipelines: Sequence[tuple[int, ...]],
        members: Sequence[int],
        rank: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        if not dist.is_nccl_available():
            raise UBUnsupportedError(f"device {device} needs torch.distributed with NCCL; this torch has none")
        self._members, self._rank = members, rank
        self._groups: dict[tuple[Direction, int, int], dist.ProcessGroup] = {}
        timeout = timedelta(seconds=timeout_s)
        directions: tuple[tuple[Direction, int], ...] = (("forward", 1), ("backward", -1))
        for ranks, (direction, step) in product(pipelines, directions):
            for source in range(len(ranks)):
                target = (source + step) % len(ranks)
                made = dist.new_group([ranks[source], ranks[target]], timeout, "nccl")  # every rank makes all
                if ranks == members and rank in (source, target):
                    self._groups[direction, source, target] = made
                    self._use_once(made, rank == source, target if rank == source else source, device)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return self._post(dist.isend, tensors, peer, self._groups[direction, self._rank, peer])

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return self._post(dist.irecv, tensors, peer, self._groups[direction, peer, self._rank])

    def close(self) -> None:
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def _use_once(self, group: dist.ProcessGroup, sends: bool, peer: int, device: torch.device) -> None:
        """The first use of a communicator sets it up and synchronises; no later transfer does."""
        token = torch.zeros(1, device=device)
        self._post(dist.isend if sends else dist.irecv, [token], peer, group).wait("set-up")

    def _post(
        self,
        operation: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        peer: int,
        group: dist.ProcessGroup,
    ) -> Work:
        rank = self._members[peer]
        return _DeviceWork(dist.batch_isend_irecv([dist.P2POp(operation, t, rank, group) for t in tensors]))


class _DeviceWork:
    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self, what: str) -> None:
        for work in self._works:
            work.wait()


class LocalWire:
    """The next stage is on the same rank (pp 1): the receiver copies what the sender left."""

    early = False

    def __init__(self) -> None:
        self._left: dict[tuple[Direction, int], Sequence[torch.Tensor]] = {}

    def send(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        self._left[direction, serial] = tensors
        return _Done()

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, direction: Direction, serial: int) -> Work:
        return _HandOver(self._left, (direction, serial), tensors)

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

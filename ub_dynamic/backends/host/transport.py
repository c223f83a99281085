# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of a TP group: raw bytes, started at once, finished by the progress thread.

Two transports, one for each way to start the ranks: MPI point to point (mpirun) and gloo (torchrun). Both
receive straight into the caller's memory. A message of another size than expected (a peer with another T) is
an error of its own, :class:`MessageSizeError`, and never data.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import UBUnsupportedError
from ...groups import Group, MPIGroup, TorchGroup

try:
    import numpy as np
    import numpy.typing as npt
except ImportError as error:
    raise UBUnsupportedError("the host backend shares memory through numpy: pip install numpy") from error

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI

Bytes = npt.NDArray[np.uint8]

# Requests that were given up. MPI may still write into their memory, which they keep alive.
_abandoned: list[Any] = []

_SPINS = 16  # polls before the first real pause: a message on the same host often comes within them
_PAUSE_S = 20e-6


class _PeerError(Exception):
    """Something about ``peer`` (rank in the group)."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class MessageSizeError(_PeerError):
    """``peer`` sent another number of bytes than this rank expects."""


class PeerLostError(_PeerError):
    """The connection to ``peer`` ended."""


class Transport(Protocol):
    """``rank`` of ``size``. Tags are below ``2 ** tag_bits``; equal (peer, tag) keep their order."""

    rank: int
    size: int
    tag_bits: int

    def send(self, data: Bytes, peer: int, tag: int) -> Any:
        """Start to send; ``data`` must not change before the request is finished."""

    def receive(self, data: Bytes, peer: int, tag: int) -> Any:
        """Start to receive exactly ``len(data)`` bytes."""

    def finish(self, requests: Sequence[Any], cancelled: Callable[[], bool]) -> bool:
        """Drive the requests until all are done (True) or ``cancelled()`` (False).

        Raises :class:`MessageSizeError` or :class:`PeerLostError`.
        """

    def close(self) -> None:
        """Give the transport's own resources back. Collective; only after every request was finished."""


def create_transport(group: Group, timeout_s: float) -> Transport:
    """The transport that fits how ``group`` was made."""
    if isinstance(group, MPIGroup):
        return MPITransport(group)
    if isinstance(group, TorchGroup):
        return GlooTransport(group, timeout_s)
    raise UBUnsupportedError(f"the host backend has no transport for a {type(group).__name__}")


class _MPIRequest:
    __slots__ = ("expected", "peer", "request")

    def __init__(self, request: MPI.Request, peer: int, expected: int | None) -> None:
        self.request, self.peer, self.expected = request, peer, expected


class MPITransport:
    """mpi4py, on a duplicate of the group's communicator. Needs ``MPI_THREAD_MULTIPLE``."""

    def __init__(self, group: MPIGroup) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UBUnsupportedError(
                "the host backend moves data in a thread of its own and needs MPI_THREAD_MULTIPLE, but MPI "
                f"was initialised with thread level {MPI.Query_thread()}: leave mpi4py.rc.thread_level at "
                "'multiple' and let mpi4py initialise MPI"
            )
        self._mpi = MPI
        self._comm = group.comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = group.rank, group.size
        # only COMM_WORLD is sure to have the attribute
        largest_tag: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
        self.tag_bits = largest_tag.bit_length() - 1
        _unlink_mpich_memory()

    def send(self, data: Bytes, peer: int, tag: int) -> _MPIRequest:
        return _MPIRequest(self._comm.Isend(data, peer, tag), peer, None)

    def receive(self, data: Bytes, peer: int, tag: int) -> _MPIRequest:
        return _MPIRequest(self._comm.Irecv(data, peer, tag), peer, len(data))

    def finish(self, requests: Sequence[_MPIRequest], cancelled: Callable[[], bool]) -> bool:
        waiting = list(requests)
        status = self._mpi.Status()
        polls = 0
        try:
            while True:
                waiting = [item for item in waiting if not self._done(item, status)]
                if not waiting:
                    return True
                if cancelled():
                    return False
                polls += 1
                time.sleep(0 if polls < _SPINS else _PAUSE_S)
        finally:
            _abandoned.extend(waiting)

    def _done(self, item: _MPIRequest, status: MPI.Status) -> bool:
        try:
            if not item.request.Test(status):
                return False
        except self._mpi.Exception as error:
            if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
                text = f"more than the expected {item.expected} bytes"
                raise MessageSizeError(item.peer, text) from None
            raise PeerLostError(item.peer, " ".join(error.Get_error_string().split())) from error
        if item.expected is not None and (received := status.Get_count(self._mpi.BYTE)) != item.expected:
            raise MessageSizeError(item.peer, f"{received} bytes instead of {item.expected}")
        return True

    def close(self) -> None:
        self._comm.Free()


def _unlink_mpich_memory() -> None:
    """Take the name from MPICH's shared segment, which it would leave in /dev/shm if a rank is killed.

    Every rank of the host has opened the segment before ``MPI_Init`` returns, and MPICH's own clean-up does
    not mind that the name is gone.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            name = line.split(maxsplit=5)[-1]
            if name.startswith("/dev/shm/mpich_shm_") and not name.endswith("(deleted)"):
                with contextlib.suppress(OSError):
                    Path(name).unlink()


class _GlooRequest:
    __slots__ = ("data", "header", "peer", "work")

    def __init__(self, peer: int, work: dist.Work | None, header: Any, data: Bytes | None = None) -> None:
        self.peer, self.work, self.header, self.data = peer, work, header, data


class GlooTransport:
    """torch.distributed point to point on the group's own process group.

    gloo neither reports a short message nor survives a long one, so each is preceded by a header with its
    size."""

    tag_bits = 30

    def __init__(self, group: TorchGroup, timeout_s: float) -> None:
        import torch.distributed as dist

        backend = dist.get_backend(group.process_group)
        if backend != "gloo":
            raise UBUnsupportedError(f"the host backend needs a gloo process group, this one is {backend!r}")
        self._group = group.process_group
        self._members = group.members
        self._timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = group.rank, group.size

    def send(self, data: Bytes, peer: int, tag: int) -> _GlooRequest:
        header = np.array([len(data)], dtype=np.int64).view(np.uint8)
        announced = self._isend(header, peer, 2 * tag)
        return _GlooRequest(peer, self._isend(data, peer, 2 * tag + 1), (announced, header, 2 * tag), None)

    def receive(self, data: Bytes, peer: int, tag: int) -> _GlooRequest:
        header = np.zeros(8, dtype=np.uint8)
        return _GlooRequest(peer, None, (self._irecv(header, peer, 2 * tag), header, 2 * tag), data)

    def finish(self, requests: Sequence[_GlooRequest], cancelled: Callable[[], bool]) -> bool:
        # gloo cannot be polled, it can only be waited for; `cancelled` is seen between two waits.
        for item in requests:
            announced, header, tag = item.header
            self._wait(announced, item.peer)
            if item.data is not None:
                size = int(header.view(np.int64)[0])
                if size != len(item.data):
                    raise MessageSizeError(item.peer, f"{size} bytes instead of {len(item.data)}")
                item.work = self._irecv(item.data, item.peer, tag + 1)
        for item in requests:
            if cancelled():
                return False
            self._wait(item.work, item.peer)
        return True

    def close(self) -> None:
        """Nothing: the process group belongs to the caller."""

    def _isend(self, data: Bytes, peer: int, tag: int) -> Any:
        import torch
        import torch.distributed as dist

        return dist.isend(torch.from_numpy(data), self._members[peer], group=self._group, tag=tag)

    def _irecv(self, data: Bytes, peer: int, tag: int) -> Any:
        import torch
        import torch.distributed as dist

        return dist.irecv(torch.from_numpy(data), self._members[peer], group=self._group, tag=tag)

    def _wait(self, work: Any, peer: int) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise PeerLostError(peer, str(error).splitlines()[0]) from error

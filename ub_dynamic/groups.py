# SPDX-License-Identifier: Apache-2.0
"""The ranks that act together (a TP group), over MPI or torch.distributed: two operations, both timed.

Only set-up, checks and shutdown go through a group; the tensors of an overlap never do.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from .errors import UBRankMismatchError, UBShapeError, UBStateError, UBTimeoutError, UBUnsupportedError
from .ranks import discover
from .seconds import check_seconds, environment_seconds

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI

_POLL_S = 0.0005
_BOOTSTRAPS = ("mpi", "gloo", "nccl")  # TE's


def default_timeout_s() -> float:
    """Seconds that a wait for another rank may take: ``UB_DYNAMIC_TIMEOUT``, or 20. :class:`UBStateError` for what is
    no such number.
    """
    return environment_seconds("UB_DYNAMIC_TIMEOUT", 20.0)


def setup_timeout_s() -> float:
    """Seconds that joining a group may take: ranks start late, import and compile at different speeds."""
    return max(60.0, default_timeout_s())


def bootstrap_timeout_s() -> float:
    """Seconds that a wait for other nodes may take before TE's constructors: more than one needs to compile the native
    file."""
    return max(300.0, default_timeout_s())


def timeout_seconds(given: float | None, default: Callable[[], float] = default_timeout_s) -> float:
    """``given``, or the default without it; :class:`UBStateError` for what is no positive, finite number."""
    return default() if given is None else check_seconds("timeout_s", given)


class Group(Protocol):
    """``rank`` of ``size`` in this group; ``members`` are their world ranks, in order."""

    rank: int
    size: int
    members: tuple[int, ...]

    def allgather(self, value: Any, what: str) -> list[Any]:
        """Every member's ``value`` (small, picklable), in rank order. :class:`UBTimeoutError` names ``what``."""

    def barrier(self, what: str) -> None:
        """Returns when every member has come. :class:`UBTimeoutError` names ``what``."""

    def close(self) -> None:
        """Release what was made for this group alone; a communicator that the caller brought stays open."""


class SoloGroup:
    """The group of a single process."""

    rank = 0
    size = 1
    members: tuple[int, ...] = (0,)

    def allgather(self, value: Any, what: str) -> list[Any]:
        return [value]

    def barrier(self, what: str) -> None:
        return

    def close(self) -> None:
        return


class MPIGroup:
    """A group over an mpi4py communicator. ``owned``: :meth:`close` frees it, else the caller does."""

    def __init__(
        self,
        comm: MPI.Comm,
        members: Sequence[int] | None = None,
        timeout_s: float | None = None,
        *,
        owned: bool = False,
    ) -> None:
        self.comm, self._owned = comm, owned
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.members = tuple(range(self.size)) if members is None else tuple(members)
        self.timeout_s = timeout_seconds(timeout_s, setup_timeout_s)

    def allgather(self, value: Any, what: str) -> list[Any]:
        # Point to point, so that a wait that ends can say which rank is missing.
        sends = [self.comm.isend(value, dest=rank, tag=_TAG) for rank in self._others()]
        values: list[Any] = [value] * self.size
        deadline = time.monotonic() + self.timeout_s
        for source in self._others():
            request = self.comm.irecv(1 << 20, source=source, tag=_TAG)
            values[source] = self._finish(request, deadline, what, source)
        for rank, request in zip(self._others(), sends, strict=True):
            self._finish(request, deadline, what, rank)
        return values

    def barrier(self, what: str) -> None:
        self.allgather(None, what)

    def close(self) -> None:
        if self._owned:
            self._owned = False
            self.comm.Free()

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _finish(self, request: MPI.Request, deadline: float, what: str, peer: int) -> Any:
        while True:
            done, value = request.test()
            if done:
                return value
            if time.monotonic() > deadline:
                request.cancel()
                raise UBTimeoutError(
                    f"rank {self.members[self.rank]} waited {self.timeout_s:g} s for rank {self.members[peer]} "
                    f"in {what}; "
                    "UB_DYNAMIC_TIMEOUT sets the wait in seconds (at least 60 for joining and leaving)"
                )
            time.sleep(_POLL_S)


_TAG = 21211  # any tag that a private communicator does not use otherwise


class TorchGroup:
    """A group over a torch.distributed process group (gloo on the host, else the group's own backend).

    ``owned``: :meth:`close` destroys it, else the caller does. ``world``: all ranks, where this group was cut out of
    more; closed with it, or before.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
        *,
        owned: bool = False,
        world: TorchGroup | None = None,
    ) -> None:
        import torch.distributed as dist

        self.process_group, self._owned, self.world = process_group, owned, world
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.members = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        self.timeout_s = timeout_seconds(timeout_s, setup_timeout_s)

    def allgather(self, value: Any, what: str) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        self._timed(what, lambda: dist.all_gather_object(values, value, group=self.process_group))
        return values

    def barrier(self, what: str) -> None:
        self.allgather(None, what)

    def meet(self, what: str, timeout_s: float) -> None:
        """A barrier (gloo only) with a timeout of its own, whose error names the ranks that are missing."""
        import torch.distributed as dist

        limit = timedelta(seconds=timeout_s)
        self._timed(what, lambda: dist.monitored_barrier(self.process_group, limit, wait_all_ranks=True))

    def close(self) -> None:
        import torch.distributed as dist

        if self.world is not None:
            self.world.close()
        if self._owned and dist.is_initialized():
            self._owned = False
            dist.destroy_process_group(self.process_group)

    def _timed(self, what: str, collective: Callable[[], None]) -> None:
        # The timeout is the process group's own, fixed when it was made; its text does not say for what it waited.
        try:
            collective()
        except RuntimeError as error:
            raise UBTimeoutError(
                f"rank {self.members[self.rank]} of {list(self.members)} did not finish {what}: {error}"
            ) from error


def tensor_parallel_group(tp_size: int, tp_group: Any = None, bootstrap_backend: str | None = None) -> Group:
    """This rank's TP group. Every rank of the world calls it.

    ``tp_group``: an mpi4py communicator or a torch.distributed process group, taken as it is; without one the
    world is cut into contiguous ranks ``[i * tp, (i + 1) * tp)``, as TE does. ``bootstrap_backend``: ``"mpi"``
    or ``"gloo"``; None takes MPI where an MPI launcher started the ranks, else torch.distributed.
    Raises :class:`UBShapeError` where the sizes do not fit, :class:`UBUnsupportedError` for a missing package.
    """
    import torch.distributed as dist

    if tp_group is not None:
        group: Group = TorchGroup(tp_group) if isinstance(tp_group, dist.ProcessGroup) else MPIGroup(tp_group)
        if group.size != tp_size:
            raise UBShapeError(f"tp_group has {group.size} ranks, but tp_size is {tp_size}")
        return group
    if bootstrap_backend not in (None, *_BOOTSTRAPS):
        known = ", ".join(_BOOTSTRAPS)
        raise UBUnsupportedError(f"bootstrap_backend = {bootstrap_backend!r}: it is one of {known}, or None")
    launch = discover()
    if bootstrap_backend == "mpi" or (bootstrap_backend is None and launch.uses_mpi):
        return _contiguous_mpi_group(tp_size)
    if launch.world_size == 1 and not dist.is_initialized():
        _check_world(1, tp_size)
        return SoloGroup()
    if launch.uses_mpi and not dist.is_initialized():
        raise UBStateError(
            f"bootstrap_backend = {bootstrap_backend!r}: an MPI launcher started the ranks, and nobody has initialised "
            "torch.distributed; leave it out, which takes MPI, or call torch.distributed.init_process_group first"
        )
    return _contiguous_torch_group(tp_size)


def _check_world(world: int, tp_size: int) -> None:
    if tp_size < 1 or world % tp_size:
        raise UBShapeError(
            f"a world of {world} rank(s) cannot be cut into TP groups of tp_size = {tp_size}; start a multiple of "
            f"{max(tp_size, 1)} ranks (mpirun -n N or torchrun --nproc-per-node N)"
        )


def _check_same(sizes: Sequence[int]) -> None:
    """Of all ranks of the world, before any of them waits in a group that others do not make."""
    if len(set(sizes)) > 1:
        ranks = "; ".join(f"rank {rank}: tp_size = {size}" for rank, size in enumerate(sizes))
        raise UBRankMismatchError(f"the ranks call initialize_ub with different arguments: {ranks}")


def _contiguous_mpi_group(tp_size: int) -> Group:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UBUnsupportedError(
            "the ranks were started by an MPI launcher, but mpi4py or its MPI library is missing: "
            f"pip install 'ub_dynamic[mpi]' ({error})"
        ) from error
    world, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    # Within the timeout of a group: a rank that was refused before, or never comes, is named.
    _check_same(MPIGroup(MPI.COMM_WORLD).allgather(tp_size, "comparing tp_size in initialize_ub"))
    _check_world(world, tp_size)
    first = rank // tp_size * tp_size
    comm = MPI.COMM_WORLD.Split(color=first, key=rank)
    return MPIGroup(comm, range(first, first + tp_size), owned=True)


def _contiguous_torch_group(tp_size: int) -> Group:
    import torch.distributed as dist

    timeout = timedelta(seconds=setup_timeout_s())
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timeout)
        atexit.register(_leave_torch)
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes: list[Any] = [None] * world
    everyone = dist.new_group(backend="gloo", timeout=timeout)
    dist.all_gather_object(sizes, tp_size, group=everyone)
    in_parts = len({*sizes}) == 1 and 0 < tp_size < world and world % tp_size == 0
    if not in_parts:
        dist.destroy_process_group(everyone)
    _check_same(sizes)
    _check_world(world, tp_size)
    mine = None
    for first in range(0, world, tp_size):
        members = range(first, first + tp_size)
        group = dist.new_group(list(members), backend="gloo", timeout=timeout)  # every rank makes every group
        if rank in members:
            mine = group
    return TorchGroup(mine, owned=True, world=TorchGroup(everyone, owned=True) if in_parts else None)


def _leave_torch() -> None:
    """Gloo's threads must not outlive the interpreter of a script that never joined torch.distributed itself."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()

# SPDX-License-Identifier: Apache-2.0
"""Transfers between pipeline stages whose token count differs from microbatch to microbatch.

::

    rank r                                       rank r + 1
    send(header, tensors) --- header, gloo --->  post(the header that comes next)
                          --- tensors -------->  wait(): compare headers, receive into buffers
                          <-- gradients' header: "consumed" = messages taken so far, so those sends are complete

Every message has a header of its own (:mod:`~ub_dynamic.pipeline.headers`), and its tensors land in buffers of
capacity with an active prefix (:mod:`~ub_dynamic.pipeline.buffers`). Sends do not block; whatever waits does so
for at most ``timeout_s`` seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import UBAlignmentError, UBCapacityError, UBShapeError, UBStateError
from ..groups import Group, SoloGroup, TorchGroup, setup_timeout_s, timeout_seconds
from .buffers import BufferPool, Lease
from .headers import WORDS, Direction, Header, check, check_dtype, pack_abort, peer_failure, unpack
from .messages import Arrival, Channel, Channels, Message, Sent, Traffic
from .wires import MAX_PARTS, HostWire, LocalWire, NcclWire, Wire, Work

_ABORT_GRACE_S = 2.0  # how long a rank that has failed stays to tell its neighbours


class PipelineTransport:
    """The neighbours of one rank in a pipeline, a ring for interleaved schedules.

    Every rank of the world makes one at the same time, whichever pipeline it is in.

    ``group``: the ranks of this pipeline in the order of their stages (default: the world). ``capacity``:
    ``(T_cap, H)``, as for UserBuffers. ``tp``: size of the tensor-parallel group if hidden states are split over
    it (sequence parallelism), so that one rank holds ``T / tp`` rows. ``timeout_s``: of every wait (default:
    ``UB_DYNAMIC_TIMEOUT``, or 20). ``poison``: fill buffers with NaN when they come back, for tests.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        capacity: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tp: int = 1,
        timeout_s: float | None = None,
        poison: bool = False,
    ) -> None:
        check_dtype(dtype)
        self.capacity, self.dtype, self.device, self.tp = capacity, dtype, torch.device(device), tp
        self.timeout_s = timeout_seconds(timeout_s)
        self.check_tokens(capacity[0])
        self.members, pipelines = _pipelines(group)
        self.size = len(self.members)
        self.rank = self.members.index(dist.get_rank()) if pipelines else 0
        self.pool = BufferPool(capacity[0] // tp, capacity[1], dtype, self.device, poison)
        self.traffic = Traffic()
        self._ended: str | None = None
        self._told: tuple[int, torch.Tensor] | None = None  # the peer that reported a failure, and its header
        following, preceding = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self._out: Channels = {"forward": Channel(following), "backward": Channel(preceding)}
        self._in: Channels = {"forward": Channel(preceding), "backward": Channel(following)}
        self._connect(pipelines)

    def _connect(self, pipelines: Sequence[tuple[int, ...]]) -> None:
        """Make the process groups of every pipeline of the world, and keep those of this one."""
        self.control: Group = SoloGroup()
        self.headers: Wire = LocalWire()
        self.payload: Wire = LocalWire()
        self._abort_wire: Wire = LocalWire()
        self._gloo: dist.ProcessGroup | None = None
        for members in pipelines:
            made = dist.new_group(list(members), timedelta(seconds=setup_timeout_s()), "gloo")
            if members == self.members:
                self._gloo = made
        if self.size == 1 or self._gloo is None:
            return
        self.control = TorchGroup(self._gloo)
        self.headers = HostWire(self._gloo, self.members, self.timeout_s, first_part=0)
        self._abort_wire = HostWire(self._gloo, self.members, _ABORT_GRACE_S, first_part=0)
        if self.device.type == "cpu":
            self.payload = HostWire(self._gloo, self.members, self.timeout_s, first_part=1)
        else:
            self.payload = NcclWire(pipelines, self.members, self.rank, self.device, self.timeout_s)

    # -- what may be sent ------------------------------------------------------------------------------------

    def check_tokens(self, tokens: int) -> None:
        """Raise unless ``tokens`` is a T that fits the buffers and splits over ``tp``."""
        if tokens < 1:
            raise UBShapeError(f"T = {tokens}: a microbatch has tokens; the next valid T is {self.tp}")
        if tokens > self.capacity[0]:
            raise UBCapacityError(f"T = {tokens} tokens exceed the pipeline's capacity of {self.capacity[0]} tokens")
        if tokens % self.tp:
            following = -(-tokens // self.tp) * self.tp
            fits = following <= self.capacity[0]
            valid = f"the next valid T is {following}" if fits else f"the largest is {following - self.tp}"
            raise UBAlignmentError(f"T = {tokens} does not split over tp = {self.tp} ranks; {valid}")

    def check_tensors(self, tensors: Sequence[torch.Tensor], tokens: int) -> None:
        """Raise unless every tensor is ``[T / tp, H]``, of the transport's dtype and on its kind of device."""
        if len(tensors) >= MAX_PARTS:
            raise UBShapeError(f"{len(tensors)} tensors in one message; it takes up to {MAX_PARTS - 1}")
        shape = (tokens // self.tp, self.capacity[1])
        for index, tensor in enumerate(tensors):
            what = f"tensor {index} to send" if index else "the hidden state to send"
            if tuple(tensor.shape) != shape:
                raise UBShapeError(
                    f"{what} is {list(tensor.shape)}: T = {tokens}, tp = {self.tp} make it {list(shape)}"
                )
            if tensor.dtype != self.dtype or tensor.device.type != self.device.type:
                wanted = f"{self.dtype} on {self.device}"
                raise UBShapeError(f"{what} is {tensor.dtype} on {tensor.device}; this transport is for {wanted}")

    # -- sending ---------------------------------------------------------------------------------------------

    def send(
        self,
        header: Header,
        tensors: Sequence[torch.Tensor],
        leases: Sequence[Lease] = (),
        limit: int | None = None,
    ) -> None:
        """Send ``tensors`` (hidden state, then blocks) to the neighbour with ``header.stage``, without waiting.

        ``leases``: buffers that the tensors may lie in; the send has a share of each, and gives it up when it is
        done. ``limit``: first wait until fewer than this many sends are under way in this direction.
        """
        self._check_usable()
        channel = self._out[header.direction]
        header = replace(header, consumed=self._in[_opposite(header.direction)].taken)
        while limit is not None and len(channel.pending) >= limit:
            self._complete(channel)
        where = channel.peer, header.direction, channel.count
        tensors = [tensor.contiguous() for tensor in tensors]
        works = self.headers.send([header.pack()], *where), self.payload.send(tensors, *where)
        channel.count += 1
        channel.pending.append(Sent(header, works, tensors, leases))
        if channel.peer != self.rank:
            self._count(header, tensors)

    def flush(self) -> None:
        """Wait until every send is done: the end of a step."""
        for channel in self._out.values():
            while channel.pending:
                self._complete(channel)

    def _complete(self, channel: Channel) -> None:
        sent = channel.pending.popleft()
        for work in sent.works:
            work.wait(f"{self._me} sent the {sent.header} to rank {self.members[channel.peer]}, which has not taken it")
        for lease in sent.leases:
            lease.release()

    def _count(self, header: Header, tensors: Sequence[torch.Tensor]) -> None:
        key = header.direction, header.microbatch
        self.traffic.blocks[key] += len(tensors) - 1
        self.traffic.tensor_bytes[key] += sum(tensor.nbytes for tensor in tensors)
        self.traffic.messages += 1
        self.traffic.header_bytes += 8 * WORDS

    # -- receiving -------------------------------------------------------------------------------------------

    def post(self, expected: Header) -> Arrival:
        """Begin to receive the message that comes next: its header, which says what to make room for."""
        self._check_usable()
        channel = self._in[expected.direction]
        serial, words = channel.count, torch.empty(WORDS, dtype=torch.int64)
        channel.count += 1
        header = self.headers.receive([words], channel.peer, expected.direction, serial)
        return Arrival(expected, serial, words, header)

    def exchange(self, arrivals: Sequence[Arrival]) -> None:
        """The end of a round: where the wire moves all of it together, that happens now."""
        if self.payload.together:
            for arrival in arrivals:
                arrival.tensors = self._take(arrival)
            self.payload.launch()

    def wait(self, arrival: Arrival) -> Message:
        """The message, after its header has been compared with the one that was to come."""
        expected = arrival.expected
        channel = self._in[expected.direction]
        leases, tensors = arrival.tensors or self._take(arrival)
        peer = self.members[channel.peer]
        tensors.wait(f"{self._me} has the header of the {expected} from rank {peer}, but its tensors do not come")
        channel.taken += 1
        return Message(leases[0].tensor.shape[0] * self.tp, leases)

    def _take(self, arrival: Arrival) -> tuple[tuple[Lease, ...], Work]:
        """Wait for the header, and begin to receive what it announces."""
        expected = arrival.expected
        channel = self._in[expected.direction]
        peer = self.members[channel.peer]
        arrival.header.wait(f"{self._me} waits for the {expected} from rank {peer}, which has not sent it")
        header = self._read(arrival.words, channel.peer)
        check(header, expected, peer, self.members[self.rank])
        assert header.tokens is not None
        self.check_tokens(header.tokens)
        self._acknowledge(header)
        return self._receive(expected, arrival.serial, header.tokens)

    def _receive(self, expected: Header, serial: int, tokens: int) -> tuple[tuple[Lease, ...], Work]:
        leases = tuple(self.pool.lease(tokens // self.tp) for _ in range(1 + expected.blocks))
        peer = self._in[expected.direction].peer
        tensors = [lease.tensor for lease in leases]
        return leases, self.payload.receive(tensors, peer, expected.direction, serial)

    def _read(self, words: torch.Tensor, peer: int) -> Header:
        names = self.members[peer], self.members[self.rank]
        failure = peer_failure(words, *names)
        if failure:
            self._told = peer, words
            raise failure
        return unpack(words, *names)

    def _acknowledge(self, header: Header) -> None:
        """What the neighbour has taken is sent: to wait for it takes no time, and frees what it pins."""
        channel = self._out[_opposite(header.direction)]
        for _ in range(header.consumed - (channel.count - len(channel.pending))):
            self._complete(channel)

    # -- steps, failure, end ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Count the traffic from zero; :class:`UBStateError` if this transport has ended."""
        self._check_usable()
        self.traffic = Traffic()

    def abort(self, error: BaseException) -> None:
        """Tell the neighbours that this rank has failed, so that they stop too.

        The transport is of no use afterwards: a message may be on its way that nobody will take.
        """
        if self._ended:
            return
        self._ended = f"{type(error).__name__}: {error}"
        words = self._told[1] if self._told else pack_abort(error)
        informed = self._told[0] if self._told else self.rank
        works = [
            self._abort_wire.send([words], channel.peer, direction, channel.count)
            for direction, channel in self._out.items()
            if channel.peer != informed
        ]
        # Stay until they know, or until nobody seems to listen: the wait that ends then cuts the connections, so that
        # a neighbour that is waiting for something else stops too.
        with contextlib.suppress(TimeoutError):
            for work in works:
                work.wait("abort")

    def close(self) -> None:
        """Give up the process groups of this transport, on all ranks of the world together."""
        self._ended = self._ended or "it is closed"
        self.payload.close()
        if self._gloo is not None:
            dist.destroy_process_group(self._gloo)
            self._gloo = None

    def _check_usable(self) -> None:
        if self._ended:
            raise UBStateError(f"this PipelineTransport has ended ({self._ended}); make a new one on every rank")

    @property
    def _me(self) -> str:
        return f"rank {self.members[self.rank]}"


def _opposite(direction: Direction) -> Direction:
    return "backward" if direction == "forward" else "forward"


def _pipelines(group: dist.ProcessGroup | None) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """World ranks of this pipeline, and of every pipeline of the world, in an order that all ranks share."""
    if not dist.is_initialized():
        return (0,), []
    mine = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if list(mine) != sorted(mine):
        raise UBShapeError(f"the ranks of the pipeline are {list(mine)}: they must ascend with the stages")
    return mine, sorted(set(TorchGroup().allgather(mine, "telling which ranks form a pipeline")))

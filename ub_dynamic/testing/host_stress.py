# SPDX-License-Identifier: Apache-2.0
"""Random operations on host communicators of one capacity, each repeated on buffers made for exactly its T."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..backends.host import ColumnParallelLinear, HostBackend, RowParallelLinear
from ..backends.host.buffers import allocation_count
from ..backends.host.bulk import BulkAllGather, BulkReduceScatter
from ..backends.host.pipeline import PipelineReduceScatter
from ..backends.host.ring import RingAllGather, RingReduceScatter
from ..backends.names import resolve_specs
from ..board import RankBoard
from ..groups import Group
from ..manager import Manager
from .stress import Operation, random_operations

HIDDEN = 64
DTYPE = torch.float32
GATHERS = ("qkv_fprop", "qkv_dgrad", "proj_dgrad")
SCATTERS = ("qkv_wgrad", "proj_fprop", "fc2_fprop", "fc1_dgrad")
LAYERS = ("attention", "mlp")
# fc2_fprop and fc1_dgrad: ring reduce-scatter; qkv and proj: TE's defaults (ring AG, pipeline RS, bulk)
CFGS = {"fc2_fprop": {"method": "ring_exchange"}, "fc1_dgrad": {"method": "ring_exchange"}}


def lengths(tp: int) -> tuple[int, ...]:
    """The T of the run: from the smallest valid one to the capacity, odd multiples of tp among them."""
    return tuple(tp * rows for rows in (2, 4, 5, 7, 12, 20, 33, 48))


@dataclass(frozen=True)
class Outcome:
    """What a run saw. ``allocations``: pieces of registered memory allocated after the start."""

    operations: int
    mismatches: int
    shape_changes: int
    allocations: int


def run(group: Group, count: int, seed: int, report: Callable[[str], None] = print) -> Outcome:
    """``count`` random operations through a manager, each compared with exact buffers. Collective.

    ``mismatches`` counts the operations that differ on any rank; ``report`` gets a text for each seen here.
    """
    player = _Player(group)
    start = allocation_count()
    operations = mismatches = 0
    for operation in random_operations(
        count, seed, lengths(group.size), gathers=GATHERS, scatters=SCATTERS, layers=LAYERS
    ):
        operations += 1
        if not player.play(operation):
            mismatches += 1
            report(f"rank {group.rank}: {operation} differs from exact buffers")
    mismatches = max(group.allgather(mismatches, "comparing mismatches"))
    allocations = max(group.allgather(allocation_count() - start, "comparing allocations"))
    outcome = Outcome(operations, mismatches, player.shape_changes, allocations)
    player.close()
    return outcome


class _Player:
    """The dynamic buffers, the exact ones, and the forwards that wait for their backward."""

    def __init__(self, group: Group) -> None:
        self._rank, self._tp = group.rank, group.size
        choices = lengths(group.size)
        specs = {tokens: resolve_specs((tokens, HIDDEN), group.size, DTYPE, CFGS) for tokens in choices}
        board = RankBoard(group)
        self._backend = HostBackend(specs[choices[-1]], group, board)
        self._manager = Manager(self._backend, (choices[-1], HIDDEN), board=board)
        self._exact = {tokens: HostBackend(specs[tokens], group) for tokens in choices}
        self._dynamic_layers = _layers(self._backend)
        self._exact_layers = {tokens: _layers(backend) for tokens, backend in self._exact.items()}
        self._waiting: dict[int, _Forward] = {}
        self.shape_changes = 0
        self._last = choices[-1]

    def play(self, operation: Operation) -> bool:
        """Whether the results on the dynamic buffers are those on the exact ones, bit by bit."""
        if operation.kind == "set_shape":
            self._manager.set_active_shape((operation.tokens, HIDDEN))
            self._count(operation.tokens)
            return self._backend.communicator("qkv_fprop").get_buffer().shape[0] == operation.tokens
        if operation.kind == "all_gather" or operation.kind == "reduce_scatter":
            one = _all_gather if operation.kind == "all_gather" else _reduce_scatter
            exact = self._exact[operation.tokens]
            return _same(one(self._backend, operation), one(exact, operation))
        if operation.kind == "backward":
            return self._backward(operation)
        return self._forward(operation)

    def close(self) -> None:
        self._manager.destroy()
        for backend in self._exact.values():
            backend.destroy()

    def _forward(self, operation: Operation) -> bool:
        gradients = operation.kind == "forward"
        x = _data(operation, self._rank, operation.tokens // self._tp, HIDDEN)
        dynamic, exact = x.clone().requires_grad_(), x.clone().requires_grad_()
        self._count(operation.tokens, self._manager.active[0])
        with torch.set_grad_enabled(gradients):
            with self._manager.microbatch(operation.tokens) as microbatch:
                out = microbatch.bind_backward(self._dynamic_layers[operation.name](dynamic))
            expected = self._exact_layers[operation.tokens][operation.name](exact)
        if gradients:
            self._waiting[operation.microbatch] = _Forward(dynamic, out, exact, expected)
        return torch.equal(out, expected)

    def _backward(self, operation: Operation) -> bool:
        forward = self._waiting.pop(operation.microbatch)
        before = self._manager.active
        grad = _data(operation, self._rank + 32, *forward.out.shape)
        results = []
        for layers, x, out in (
            (self._dynamic_layers, forward.x, forward.out),
            (self._exact_layers[operation.tokens], forward.exact_x, forward.exact_out),
        ):
            inputs = [x, *layers[operation.name].parameters()]
            results.append(torch.autograd.grad(out, inputs, grad))
        self._manager.set_active_shape(before)  # the backward left its own T, as it does in a schedule
        self._count(operation.tokens, before[0])
        return _same(*results)

    def _count(self, *lengths: int) -> None:
        for tokens in lengths:
            self.shape_changes += tokens != self._last
            self._last = tokens


@dataclass(frozen=True)
class _Forward:
    x: torch.Tensor
    out: torch.Tensor
    exact_x: torch.Tensor
    exact_out: torch.Tensor


def _layers(backend: HostBackend) -> dict[str, torch.nn.Sequential]:
    """The same parameters on every backend and, put together, of every rank."""
    torch.manual_seed(0)
    return {
        name: torch.nn.Sequential(
            ColumnParallelLinear(HIDDEN, 2 * HIDDEN, ub_name=column, backend=backend),
            torch.nn.Tanh(),
            RowParallelLinear(2 * HIDDEN, HIDDEN, ub_name=row, backend=backend),
        )
        for name, column, row in (("attention", "qkv", "proj"), ("mlp", "fc1", "fc2"))
    }


def _all_gather(backend: HostBackend, operation: Operation) -> list[torch.Tensor]:
    comm = backend.operand(operation.name, operation.tokens)
    comm.copy_into_buffer(_data(operation, comm.rank, comm.local_rows, HIDDEN), local_chunk=True)
    weight = _data(operation, 64, HIDDEN, HIDDEN)
    out = torch.empty(operation.tokens, HIDDEN, dtype=DTYPE)
    if isinstance(comm, RingAllGather):
        for rows, chunk in comm.all_gather_chunks():
            torch.mm(chunk, weight, out=out[rows])
    else:
        assert isinstance(comm, BulkAllGather)
        with comm.all_gather():
            torch.mm(out.zero_(), weight)
        torch.mm(comm.get_buffer(), weight, out=out)
    return [out, comm.get_buffer().clone()]


def _reduce_scatter(backend: HostBackend, operation: Operation) -> list[torch.Tensor]:
    comm = backend.operand(operation.name, operation.tokens)
    x = _data(operation, comm.rank, operation.tokens, 24)
    weight = _data(operation, 64 + comm.rank, HIDDEN, 24)
    out = torch.empty(comm.local_rows, HIDDEN, dtype=DTYPE)
    if isinstance(comm, BulkReduceScatter):
        torch.mm(x, weight.t(), out=comm.get_buffer())
        with comm.reduce_scatter(out):
            torch.mm(x, weight.t())
        return [out]
    assert isinstance(comm, PipelineReduceScatter | RingReduceScatter)
    for rows, columns, block in comm.reduce_scatter_chunks(out):
        torch.mm(x[rows], weight[columns].t(), out=block)
    return [out]


def _data(operation: Operation, stream: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(operation.seed * 128 + stream)
    return torch.randn(shape, generator=generator, dtype=DTYPE)


def _same(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

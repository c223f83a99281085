# SPDX-License-Identifier: Apache-2.0
"""Ring communicators: each chunk is multiplied while its neighbour in the order is on its way.

Use::

    gather.copy_into_buffer(x, local_chunk=True)
    for rows, chunk in gather.all_gather_chunks():
        torch.mm(chunk, weight.t(), out=out[rows])

    for rows, columns, slot in scatter.reduce_scatter_chunks(out):
        torch.mm(x[rows], weight[columns].t(), out=slot)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...shapes import CommSpec
from .buffers import Region
from .communicator import Communicator, Extent, check_output, gemm_span
from .engine import Operation
from .progress import Transfer


class RingAllGather(Communicator):
    """``tp`` chunks ``[T/tp, H]``, rank r's at ``r * c``.

    Step i multiplies chunk ``(rank - i) % tp`` while it is sent on to the next rank and chunk
    ``(rank - i - 1) % tp`` comes from the rank before.

    With ``spec.aggregate`` two neighbours exchange their chunks first, and pairs of chunks travel and are
    multiplied: half as many, larger GEMMs.
    """

    @property
    def _width(self) -> int:
        """How many chunks travel together."""
        return 2 if self.spec.aggregate else 1

    def all_gather_chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ``(rows, chunk)``, this rank's chunk first; at the end the view ``[T, H]`` is complete."""
        with self._engine.operation("ring all-gather", self.name, self.tokens) as operation:
            transfers = self._submit(operation)
            steps = self.tp // self._width
            first = steps - len(transfers)  # the first step that needs a transfer
            for step in range(steps):
                if step >= first:
                    operation.wait(transfers[step - first])
                index = self._index(step)
                with gemm_span(f"{self.name} chunk {index}"):
                    yield self._span(index), self._piece(index).tensor

    @contextmanager
    def all_gather(self) -> Iterator[None]:
        """The same transfers beside a body that does not use the chunks."""
        with self._engine.operation("ring all-gather", self.name, self.tokens) as operation:
            transfers = self._submit(operation)
            yield
            for transfer in transfers:
                operation.wait(transfer)

    def _submit(self, operation: Operation) -> list[Transfer]:
        """All steps at once: the progress thread starts each when the one before it has ended."""
        transfers = []
        if self._width == 2:
            partner = self.rank ^ 1
            own, theirs = self._chunk(self.rank), self._chunk(partner)
            transfers.append(operation.transfer(f"chunk {partner}", [(own, partner)], [(theirs, partner)]))
        after, before = (self.rank + self._width) % self.tp, (self.rank - self._width) % self.tp
        for step in range(self.tp // self._width - 1):
            sent, received = self._index(step), self._index(step + 1)
            transfers.append(
                operation.transfer(
                    f"chunk {received * self._width}",
                    [(self._piece(sent), after)],
                    [(self._piece(received), before)],
                )
            )
        return transfers

    def _index(self, step: int) -> int:
        """Which chunk (or pair of chunks) is multiplied in that step."""
        return (self.rank // self._width - step) % (self.tp // self._width)

    def _piece(self, index: int) -> Region:
        chunk = self.layout.chunks[index * self._width]
        return self._memory.region(chunk.offset, (chunk.rows * self._width, chunk.columns))

    def _span(self, index: int) -> slice:
        rows = self.local_rows * self._width
        return slice(index * rows, (index + 1) * rows)


class RingReduceScatter(Communicator):
    """``2*tp - 1`` chunks ``[T/tp, H]``: what is sent, this rank's own, what is received.

    Slot i holds the partial sums for rank ``(rank + i + 1) % tp``, so its own are last, in slot ``tp - 1``. Each
    is sent while the next is computed; what comes lands in slots ``tp`` to ``2*tp - 2``. The sum starts with
    slot ``tp - 1`` and goes on in their order, in float32, rounded once.
    """

    @classmethod
    def needs(cls, spec: CommSpec) -> Extent:
        return super().needs(spec) | Extent(0, sums=spec.capacity[0] // spec.tp * spec.capacity[1])

    def reduce_scatter_chunks(self, out: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield ``(rows, columns, slot)`` for each rank's rows; the body writes its partial sums into ``slot``.

        At the end ``out`` ``[T/tp, H]`` holds this rank's rows of the sum over all ranks.
        """
        check_output(self.name, out, (self.local_rows, self.hidden), self.spec.dtype)
        with self._engine.operation("ring reduce-scatter", self.name, self.tokens) as operation:
            transfers = []
            for slot in range(self.tp):
                owner = (self.rank + slot + 1) % self.tp
                with gemm_span(f"{self.name} chunk {owner}"):
                    yield self._rows(owner), slice(0, self.hidden), self._chunk(slot).tensor
                if slot < self.tp - 1:
                    transfers.append(self._send(operation, slot, owner))
            for transfer in transfers:
                operation.wait(transfer)
            self._storage.reduce([self._chunk(slot).tensor for slot in self.layout.reduce_slots], out)

    def _send(self, operation: Operation, slot: int, owner: int) -> Transfer:
        source = (self.rank - slot - 1) % self.tp
        return operation.transfer(
            f"chunk from rank {source} of the group",
            sends=[(self._chunk(slot), owner)],
            receives=[(self._chunk(self.layout.receive_slots[slot]), source)],
        )

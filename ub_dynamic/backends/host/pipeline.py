# SPDX-License-Identifier: Apache-2.0
"""Pipelined reduce-scatter: column blocks of the output; block i travels while block i + 1 is computed.

Use::

    for rows, columns, block in comm.reduce_scatter_chunks(out):
        torch.mm(x[rows], weight[columns].t(), out=block)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...shapes import CommSpec
from .buffers import Region
from .communicator import Communicator, Extent, check_output, gemm_span
from .engine import Operation
from .progress import Transfer


class PipelineReduceScatter(Communicator):
    """``num_splits`` contiguous blocks ``[T, H/num_splits]``; in each, rank r owns the rows from ``r * T/tp`` on.

    Sums are taken in rank order in float32 and rounded once into the strided output.
    """

    @classmethod
    def needs(cls, spec: CommSpec) -> Extent:
        own = spec.capacity[0] // spec.tp * spec.capacity[1]
        return super().needs(spec) | Extent(0, own * (spec.tp - 1), own // spec.num_splits)

    def reduce_scatter_chunks(self, out: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield ``(rows, columns, block)`` for each block; the body writes its partial sums into ``block``.

        At the end ``out`` ``[T/tp, H]`` holds this rank's rows of the sum over all ranks.
        """
        check_output(self.name, out, (self.local_rows, self.hidden), self.spec.dtype)
        with self._engine.operation("pipeline reduce-scatter", self.name, self.tokens) as operation:
            transfers = []
            for chunk in self.layout.chunks:
                columns = slice(chunk.index * chunk.columns, (chunk.index + 1) * chunk.columns)
                with gemm_span(f"{self.name} block {chunk.index}"):
                    yield slice(0, self.tokens), columns, self._chunk(chunk.index).tensor
                transfers.append((columns, self._send(operation, chunk.index)))
            for index, (columns, transfer) in enumerate(transfers):
                operation.wait(transfer)
                parts = [self._part(index, rank).tensor for rank in range(self.tp)]
                self._storage.reduce(parts, out[:, columns])

    def _send(self, operation: Operation, index: int) -> Transfer:
        return operation.transfer(
            f"block {index}",
            sends=[(self._piece(index, peer), peer) for peer in self._peers()],
            receives=[(self._part(index, peer), peer) for peer in self._peers()],
        )

    def _piece(self, index: int, owner: int) -> Region:
        """This rank's partial sums for ``owner`` in block ``index``: contiguous rows of it."""
        chunk = self.layout.chunks[index]
        numel = self.local_rows * chunk.columns
        return self._memory.region(chunk.offset + owner * numel, (self.local_rows, chunk.columns))

    def _part(self, index: int, source: int) -> Region:
        """What ``source`` adds to this rank's rows of block ``index``: its own piece, or what it received."""
        if source == self.rank:
            return self._piece(index, self.rank)
        columns = self.layout.chunks[index].columns
        numel = self.local_rows * columns
        slot = index * (self.tp - 1) + (source if source < self.rank else source - 1)
        return self._storage.received_region(slot * numel, (self.local_rows, columns))

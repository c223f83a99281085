# SPDX-License-Identifier: Apache-2.0
"""Bulk communicators: the whole collective runs beside one GEMM that does not depend on it.

The body of the ``with`` statement is what overlaps::

    gather.copy_into_buffer(x, local_chunk=True)
    with gather.all_gather():
        torch.mm(grad_output, weight, out=scatter.get_buffer())
    with scatter.reduce_scatter(grad_input):
        grad_weight = grad_output.t() @ gather.get_buffer()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...shapes import CommSpec
from .communicator import Communicator, Extent, check_output


class BulkAllGather(Communicator):
    """Rank r's chunk ``[T/tp, H]`` at ``r * c``; afterwards the view ``[T, H]`` is complete."""

    @contextmanager
    def all_gather(self) -> Iterator[None]:
        """Send this rank's chunk to all and receive theirs in place, while the body runs."""
        with self._engine.operation("bulk all-gather", self.name, self.tokens) as operation:
            own = self._chunk(self.rank)
            transfer = operation.transfer(
                "all chunks",
                sends=[(own, peer) for peer in self._peers()],
                receives=[(self._chunk(peer), peer) for peer in self._peers()],
            )
            yield
            operation.wait(transfer)


class BulkReduceScatter(Communicator):
    """The buffer holds this rank's partial sums ``[T, H]``; rank r gets the sum of the rows from ``r * T/tp`` on.

    The sum is taken in rank order in float32 and rounded once, so it is the same whatever arrives first.
    """

    @classmethod
    def needs(cls, spec: CommSpec) -> Extent:
        own = spec.capacity[0] // spec.tp * spec.capacity[1]
        return super().needs(spec) | Extent(0, own * (spec.tp - 1), own)

    @contextmanager
    def reduce_scatter(self, out: torch.Tensor) -> Iterator[None]:
        """``out`` ``[T/tp, H]`` = this rank's rows of the sum; transfers run beside the body."""
        check_output(self.name, out, (self.local_rows, self.hidden), self.spec.dtype)
        with self._engine.operation("bulk reduce-scatter", self.name, self.tokens) as operation:
            numel, shape = self.layout.local_numel, (self.local_rows, self.hidden)
            slots = {peer: self._storage.received_region(i * numel, shape) for i, peer in enumerate(self._peers())}
            transfer = operation.transfer(
                "all chunks",
                sends=[(self._chunk(peer), peer) for peer in self._peers()],
                receives=[(slots[peer], peer) for peer in self._peers()],
            )
            yield
            operation.wait(transfer)
            parts = [slots[rank].tensor if rank != self.rank else self._local() for rank in range(self.tp)]
            self._storage.reduce(parts, out)

# SPDX-License-Identifier: Apache-2.0
"""BlockStore: the blocks that one rank keeps for its later chunks, and the gradients that these leave for it.

Nothing is copied: a kept block is an alias of the tensor that arrived or was committed, cut off from its graph.
Values go after the forward of the rank's last chunk, gradients with the backward of the chunk that received or
committed the block; only tensors of microbatches under way are ever held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import UBStateError
from .buffers import Lease


@dataclass(frozen=True)
class Kept:
    """A block: detached, and the receive buffer under it if it came from another rank."""

    tensor: torch.Tensor
    lease: Lease | None = None


@dataclass
class _Deposit:
    grad: torch.Tensor
    count: int = 1


class BlockStore:
    """The blocks of one rank, by microbatch. All sizes in bytes."""

    def __init__(self) -> None:
        self._values: dict[int, dict[int, Kept]] = {}
        self._deposits: dict[int, dict[int, _Deposit]] = {}
        self.value_bytes = self.deposit_bytes = 0
        self.peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        """What is held now, values and gradients."""
        return self.value_bytes + self.deposit_bytes

    @property
    def empty(self) -> bool:
        return not self._values and not self._deposits

    # -- forward ---------------------------------------------------------------------------------------------

    def put(self, microbatch: int, block: int, tensor: torch.Tensor, lease: Lease | None = None) -> None:
        """Keep a block; its receive buffer, if any, is shared until :meth:`release`."""
        blocks = self._values.setdefault(microbatch, {})
        if block in blocks:
            raise UBStateError(f"block {block} of microbatch {microbatch} is kept already")
        blocks[block] = Kept(tensor.detach(), lease.share() if lease else None)
        self.value_bytes += tensor.nbytes
        self._note_peak()

    def kept(self, microbatch: int) -> dict[int, Kept]:
        """The blocks of a microbatch, by number."""
        return dict(self._values.get(microbatch, {}))

    def release(self, microbatch: int) -> None:
        """Give up the values of a microbatch: from here on only autograd may hold them."""
        for kept in self._values.pop(microbatch, {}).values():
            self.value_bytes -= kept.tensor.nbytes
            if kept.lease:
                kept.lease.release()

    # -- backward --------------------------------------------------------------------------------------------

    def deposit(self, microbatch: int, block: int, grad: torch.Tensor) -> None:
        """Leave a later chunk's gradient of a kept block for the chunk that brought it in."""
        deposits = self._deposits.setdefault(microbatch, {})
        if block in deposits:
            # Out of place: a gradient may share memory with another one.
            deposits[block] = _Deposit(deposits[block].grad + grad, deposits[block].count + 1)
        else:
            deposits[block] = _Deposit(grad)
            self.deposit_bytes += grad.nbytes
        self._note_peak()

    def collect(self, microbatch: int, block: int, expected: int) -> torch.Tensor | None:
        """Take the sum of what later chunks left for a block; :class:`UBStateError` unless ``expected`` of them did."""
        deposit = self._deposits.get(microbatch, {}).pop(block, None)
        count = deposit.count if deposit else 0
        if count != expected:
            raise UBStateError(
                f"block {block} of microbatch {microbatch} has {count} gradients from later chunks, the routes say "
                f"{expected}"
            )
        if deposit is None:
            return None
        if not self._deposits[microbatch]:
            del self._deposits[microbatch]
        self.deposit_bytes -= deposit.grad.nbytes
        return deposit.grad

    def check_finished(self, microbatch: int) -> None:
        """After the backward of the rank's first chunk: :class:`UBStateError` if anything of it is left."""
        values, deposits = self._values.get(microbatch, {}), self._deposits.get(microbatch, {})
        if values or deposits:
            raise UBStateError(
                f"microbatch {microbatch} is through, but the store still holds the values of blocks {sorted(values)} "
                f"and the gradients of blocks {sorted(deposits)}"
            )

    def clear(self) -> None:
        """Give up everything: a microbatch has failed."""
        for microbatch in list(self._values):
            self.release(microbatch)
        self._deposits.clear()
        self.deposit_bytes = 0

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

# SPDX-License-Identifier: Apache-2.0
"""Receive buffers at capacity, reused with an active prefix: what UserBuffers do, for transfers between stages.

A buffer is leased for one arriving tensor. Whoever reads it (a chunk's saved activations, the block store, a send
under way) holds a share, and the buffer goes back to the pool with the last share: never before autograd is done.
"""

from __future__ import annotations

import torch

from ..errors import UBCapacityError, UBStateError


class BufferPool:
    """Buffers of ``[rows, width]``, made when none is free and kept from then on."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device, poison: bool = False) -> None:
        self.rows, self.width, self.dtype, self.device = rows, width, dtype, device
        self.made = 0
        self._free: list[torch.Tensor] = []
        self._poison = poison

    @property
    def leased(self) -> int:
        return self.made - len(self._free)

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        return self.made * self.rows * self.width * self.dtype.itemsize

    def lease(self, rows: int) -> Lease:
        """A buffer with the active prefix ``[rows, width]``."""
        if rows > self.rows:
            raise UBCapacityError(f"{rows} rows do not fit a receive buffer of {self.rows} rows")
        if not self._free:
            self._free.append(torch.empty(self.rows, self.width, dtype=self.dtype, device=self.device))
            self.made += 1
        return Lease(self, self._free.pop(), rows)

    def take_back(self, buffer: torch.Tensor) -> None:
        if self._poison:
            buffer.fill_(float("nan"))
        self._free.append(buffer)


class Lease:
    """One buffer in use. ``tensor``: its active prefix."""

    def __init__(self, pool: BufferPool, buffer: torch.Tensor, rows: int) -> None:
        self._pool, self._buffer, self._shares = pool, buffer, 1
        self.tensor = buffer[:rows]

    def share(self) -> Lease:
        """One more holder."""
        self._check()
        self._shares += 1
        return self

    def release(self) -> None:
        """One holder less; the last one gives the buffer back."""
        self._check()
        self._shares -= 1
        if self._shares == 0:
            self._pool.take_back(self._buffer)

    def _check(self) -> None:
        if self._shares == 0:
            raise UBStateError("a receive buffer is used after its last holder gave it back")

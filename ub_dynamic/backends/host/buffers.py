# SPDX-License-Identifier: Apache-2.0
"""Registered memory: aligned, allocated once at capacity, never again; views of it cost nothing.

Every byte that a host communicator owns, staging included, comes from :class:`RegisteredMemory`, so
:func:`allocation_count` tells whether anything was allocated after the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .transport import Bytes

ALIGNMENT = 64  # a cache line; GEMM kernels may pick another summation order for another alignment

_count = 0
_nbytes = 0


def allocation_count() -> int:
    """How many pieces of memory the host communicators of this process have allocated so far."""
    return _count


def allocated_bytes() -> int:
    """Their bytes."""
    return _nbytes


@dataclass(frozen=True)
class Region:
    """A piece of memory: as a tensor, and as the bytes of a message."""

    tensor: torch.Tensor
    data: Bytes


class RegisteredMemory:
    """``numel`` elements of ``dtype``, zeroed (so that every page exists), 64-byte aligned."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        global _count, _nbytes
        self.dtype, self.numel = dtype, numel
        nbytes = numel * dtype.itemsize
        raw = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8)
        skip = -raw.data_ptr() % ALIGNMENT
        self._bytes = raw[skip : skip + nbytes]
        self._data: Bytes = self._bytes.numpy()
        self.flat = self._bytes.view(dtype)
        _count += 1
        _nbytes += nbytes + ALIGNMENT

    def view(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """``shape`` elements from element ``offset`` on, without a copy."""
        numel = 1
        for size in shape:
            numel *= size
        return self.flat[offset : offset + numel].view(shape)

    def region(self, offset: int, shape: tuple[int, ...]) -> Region:
        """The same, with its bytes."""
        tensor = self.view(offset, shape)
        begin = offset * self.dtype.itemsize
        return Region(tensor, self._data[begin : begin + tensor.numel() * self.dtype.itemsize])

# SPDX-License-Identifier: Apache-2.0
"""What one ring step multiplies: for every packed sequence a range of query rows and a range of key rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch


class Ranges(NamedTuple):
    """int64 ``[sequences]`` on the host: the first row of each sequence, and how many rows."""

    starts: torch.Tensor
    counts: torch.Tensor

    def rows(self) -> torch.Tensor:
        """int64 indices of all rows, sequence by sequence."""
        shift = (self.starts - (self.counts.cumsum(0) - self.counts)).repeat_interleave(self.counts)
        return torch.arange(shift.numel()) + shift


@dataclass(frozen=True, eq=False)
class Section:
    """Query rows ``q`` of every sequence attend to key rows ``k``.

    The rows are those of one rank's buffers, of ``rows`` rows. ``causal``: query row i sees key rows up to i, which
    needs equal counts. ``max_q``, ``max_k``: upper bounds of the counts, for the kernels. A sequence whose queries
    see no key, or whose keys no query sees, has both counts 0.
    """

    rows: int
    q: Ranges
    k: Ranges
    max_q: int
    max_k: int
    causal: bool

    @classmethod
    def of(cls, rows: int, q: Ranges, k: Ranges, max_q: int, max_k: int, causal: bool = False) -> Section:
        """A section without the sequences that would multiply nothing."""
        used = (q.counts > 0) & (k.counts > 0)
        return cls(rows, Ranges(q.starts, q.counts * used), Ranges(k.starts, k.counts * used), max_q, max_k, causal)

    @cached_property
    def empty(self) -> bool:
        """Whether no query sees any key."""
        return not self.q.counts.any()

    @cached_property
    def slices(self) -> list[tuple[slice, slice]]:
        """Query and key rows of every sequence that has any."""
        every = zip(*(one.tolist() for one in (*self.q, *self.k)), strict=True)
        return [(slice(q, q + n), slice(k, k + m)) for q, n, k, m in every if n]

    def tables(self) -> tuple[torch.Tensor, ...]:
        """int32 ``[sequences + 1]`` on the host, for queries, then for keys: cumulative counts, and first rows."""
        ends = torch.tensor([self.rows])
        zero = torch.zeros(1, dtype=torch.int64)
        return tuple(
            torch.cat(pair).to(torch.int32)
            for one in (self.q, self.k)
            for pair in ((zero, one.counts.cumsum(0)), (one.starts, ends))
        )


@dataclass(frozen=True, eq=False)
class DeviceSection:
    """A :class:`Section` and its tables on a device.

    ``q_cu``, ``k_cu``: cumulative counts; ``q_offsets``, ``k_offsets``: first rows, the last entry being the rows of
    the buffer; all int32 ``[sequences + 1]``. ``q_rows``, ``k_rows``: int64 indices for kernels that need the rows
    next to each other, None where those are all rows of the buffer.
    """

    host: Section
    q_cu: torch.Tensor
    q_offsets: torch.Tensor
    k_cu: torch.Tensor
    k_offsets: torch.Tensor
    q_rows: torch.Tensor | None
    k_rows: torch.Tensor | None

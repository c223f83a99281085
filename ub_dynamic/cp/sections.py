# SPDX-License-Identifier: Apache-2.0
"""What one ring step multiplies: for every packed sequence a range of query rows and a range of key rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

Ranges = tuple[tuple[int, ...], tuple[int, ...]]  # first row and number of rows of each sequence


@dataclass(frozen=True)
class Section:
    """Rows ``[q_start, q_start + q_count)`` of every sequence attend to ``[k_start, k_start + k_count)``.

    The rows are those of one rank's buffers, of ``rows`` rows. ``causal``: query row i sees key rows up to i, which
    needs equal counts. ``max_q``, ``max_k``: upper bounds of the counts, for the kernels. A sequence whose queries
    see no key, or whose keys no query sees, has both counts 0.
    """

    rows: int
    q_starts: tuple[int, ...]
    q_counts: tuple[int, ...]
    k_starts: tuple[int, ...]
    k_counts: tuple[int, ...]
    max_q: int
    max_k: int
    causal: bool

    @classmethod
    def of(cls, rows: int, q: Ranges, k: Ranges, max_q: int, max_k: int, causal: bool = False) -> Section:
        """A section without the sequences that would multiply nothing."""
        q_counts, k_counts = [], []
        for q_count, k_count in zip(q[1], k[1], strict=True):
            used = q_count > 0 and k_count > 0
            q_counts.append(q_count if used else 0)
            k_counts.append(k_count if used else 0)
        return cls(rows, q[0], tuple(q_counts), k[0], tuple(k_counts), max_q, max_k, causal)

    @cached_property
    def empty(self) -> bool:
        """Whether no query sees any key."""
        return not any(self.q_counts)

    @property
    def work(self) -> int:
        """Query-key pairs, those that a causal mask hides included."""
        return sum(q * k for q, k in zip(self.q_counts, self.k_counts, strict=True))

    def q_rows(self) -> torch.Tensor:
        """int64 indices of the query rows, on the host."""
        return _rows(self.q_starts, self.q_counts)

    def k_rows(self) -> torch.Tensor:
        """int64 indices of the key rows, on the host."""
        return _rows(self.k_starts, self.k_counts)

    def tables(self) -> tuple[torch.Tensor, ...]:
        """int32 ``[sequences + 1]`` on the host, for queries, then for keys: cumulative counts, and first rows."""
        return (
            _ints(accumulate(self.q_counts, initial=0)),
            _ints((*self.q_starts, self.rows)),
            _ints(accumulate(self.k_counts, initial=0)),
            _ints((*self.k_starts, self.rows)),
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


def _ints(values: object) -> torch.Tensor:
    return torch.tensor(tuple(values), dtype=torch.int32)  # type: ignore[arg-type]


def _rows(starts: tuple[int, ...], counts: tuple[int, ...]) -> torch.Tensor:
    first, number = torch.tensor(starts, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
    shift = torch.repeat_interleave(first - (torch.cumsum(number, 0) - number), number)
    return torch.arange(shift.numel()) + shift

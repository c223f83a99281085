# SPDX-License-Identifier: Apache-2.0
"""Grid2D: packed images or video frames, of which every context-parallel rank holds one rectangular block.

For bidirectional attention with 2-D rotary positions, where neighbours should stay on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import UBAlignmentError, UBShapeError, UBUnsupportedError
from ..packing import PackedBatch
from .partition import Partition, check_rank


@dataclass(frozen=True)
class Block:
    """What one rank holds of one entry: ``frames`` times rows and columns of a ``[height, width]`` frame."""

    frames: int
    width: int
    frame_tokens: int
    rows: range
    columns: range

    def cells(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Frame, row and column of every token, row-major."""
        frames, rows, columns = (
            torch.arange(axis.start, axis.stop) for axis in (range(self.frames), self.rows, self.columns)
        )
        grid = torch.meshgrid(frames, rows, columns, indexing="ij")
        return grid[0].flatten(), grid[1].flatten(), grid[2].flatten()


@dataclass(frozen=True)
class Grid2D(Partition):
    """See :meth:`Partition.grid2d`. Ghosts and empty entries are no frames: they are split contiguously."""

    heights: tuple[int, ...]
    widths: tuple[int, ...]
    ranks: tuple[int, int] | None = None
    name: ClassVar[str] = "grid2d"

    @classmethod
    def of(cls, height: int | Sequence[int], width: int | Sequence[int], ranks: tuple[int, int] | None) -> Grid2D:
        heights = (height,) if isinstance(height, int) else tuple(height)
        widths = (width,) if isinstance(width, int) else tuple(width)
        count = max(len(heights), len(widths))
        heights = heights * count if len(heights) == 1 else heights
        widths = widths * count if len(widths) == 1 else widths
        if len(heights) != len(widths):
            raise UBShapeError(f"grid2d with {len(heights)} heights and {len(widths)} widths: one pair a document")
        if min(heights + widths, default=0) < 1 or (ranks is not None and min(ranks) < 1):
            raise UBShapeError(f"grid2d({heights}, {widths}, ranks={ranks}): sizes must be at least 1")
        return cls(heights, widths, ranks)

    def offsets(self, batch: PackedBatch, rank: int) -> torch.Tensor:
        pieces = []
        for entry in self._blocks(batch, rank):
            if isinstance(entry, range):
                pieces.append(torch.arange(entry.start, entry.stop))
            else:
                frame, row, column = entry.cells()
                pieces.append(frame * entry.frame_tokens + row * entry.width + column)
        return torch.cat(pieces)

    def positions(self, batch: PackedBatch, rank: int) -> torch.Tensor:
        """``[T/cp, 2]``: row and column in the frame; (0, 0) in ghosts, so that any table holds them."""
        pieces = []
        for entry in self._blocks(batch, rank):
            if isinstance(entry, range):
                pieces.append(torch.zeros(len(entry), 2, dtype=torch.int64))
            else:
                _, row, column = entry.cells()
                pieces.append(torch.stack([row, column], dim=1))
        return torch.cat(pieces)

    def _blocks(self, batch: PackedBatch, rank: int) -> Iterator[Block | range]:
        """For every entry the block of ``rank``, or the range of offsets where the entry is no document."""
        check_rank(batch, rank)
        if len(self.heights) not in (1, batch.documents):
            raise UBShapeError(
                f"grid2d has {len(self.heights)} frame sizes, the batch has {batch.documents} documents: "
                f"give one size, or one a document"
            )
        for index, rows in enumerate(batch.padded):
            local = rows // batch.cp
            if index >= batch.documents or rows == 0:
                yield range(rank * local, (rank + 1) * local)
            else:
                yield self._block(batch, rank, index)

    def _block(self, batch: PackedBatch, rank: int, index: int) -> Block:
        height, width = self.heights[index % len(self.heights)], self.widths[index % len(self.widths)]
        tokens, padded = batch.seqlens[index], batch.padded[index]
        if tokens % (height * width):
            raise UBShapeError(
                f"document {index} has {tokens} tokens: grid2d needs whole frames of {height} x {width} = "
                f"{height * width} tokens"
            )
        if tokens != padded:
            raise UBUnsupportedError(
                f"document {index} has {tokens} tokens in {padded} rows: grid2d has no place for padding "
                f"inside a document; take frames that are multiples of 2*cp = {2 * batch.cp} tokens, and "
                f"tail='ghost'"
            )
        down, across = self._grid(height, width, batch.cp, index)
        row, column = divmod(rank, across)
        tall, wide = height // down, width // across
        return Block(
            frames=tokens // (height * width),
            width=width,
            frame_tokens=height * width,
            rows=range(row * tall, (row + 1) * tall),
            columns=range(column * wide, (column + 1) * wide),
        )

    def _grid(self, height: int, width: int, cp: int, index: int) -> tuple[int, int]:
        """Rows and columns of the grid of ranks."""
        every = [(down, cp // down) for down in range(1, cp + 1) if cp % down == 0]
        grids = every if self.ranks is None else [self.ranks]
        if self.ranks is not None and self.ranks not in every:
            raise UBShapeError(f"grid2d over {self.ranks[0]} x {self.ranks[1]} ranks: their product must be cp = {cp}")
        fitting = [(down, across) for down, across in grids if height % down == 0 and width % across == 0]
        if not fitting:
            raise UBAlignmentError(
                f"document {index}: no frame of {height} x {width} can be cut over "
                f"{' or '.join(f'{down} x {across}' for down, across in grids)} ranks; height must be a "
                f"multiple of the rows of ranks, width one of the columns"
            )
        return min(fitting, key=lambda grid: abs(height // grid[0] - width // grid[1]))

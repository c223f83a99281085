# SPDX-License-Identifier: Apache-2.0
"""Partition: which rows of a packed tensor each context-parallel (CP) rank holds, and what that is exact for.

Every partition gives a rank ``padded[i] / cp`` rows of every sequence i, sequences in order. That much makes
bidirectional attention exact for any choice of rows, since a ring over all ranks meets every key of the
sequence once; causal attention by ring steps needs the zigzag. Splitting the whole buffer contiguously would
break it as soon as there are two sequences, so no such partition exists here.

A *local row* is a row of one rank's tensor ``[T/cp, ...]``; a *packed row* is one of ``[T, ...]``. The first
half of a rank's rows of a sequence is what TE's kernels call its first chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import torch

from ..errors import UBShapeError, UBUnsupportedError
from ..packing import PackedBatch

Mask = Literal["padding", "padding_causal"]
Half = Literal["both", "first", "second"]
Engine = Literal["ub_dynamic", "te"]

_THD_NAMES = {"no_mask": "padding", "causal": "padding_causal"}  # what TE calls the same masks without THD


class Partition(ABC):
    """What a CP rank holds of a :class:`~ub_dynamic.packing.PackedBatch`; index tensors are int64 on the CPU.

    Make one with :meth:`zigzag`, :meth:`contiguous`, :meth:`grid2d` or :meth:`custom`. Every method takes the
    batch, so that one partition serves all batches; results are computed anew, so keep what a batch needs
    often.
    """

    name: ClassVar[str]
    exact_masks: ClassVar[frozenset[str]] = frozenset({"padding"})

    @staticmethod
    def zigzag() -> Partition:
        """Of ``2*cp`` equal chunks of every sequence rank r holds r and ``2*cp-1-r``: balanced causal work.

        TE's and Megatron's split (``thd_get_partitioned_indices``).
        """
        return Zigzag()

    @staticmethod
    def contiguous() -> Partition:
        """Of every sequence rank r holds the r-th of ``cp`` equal pieces."""
        return Contiguous()

    @staticmethod
    def grid2d(
        height: int | Sequence[int], width: int | Sequence[int], ranks: tuple[int, int] | None = None
    ) -> Partition:
        """Every document is one or more row-major ``height x width`` frames; a rank holds one block of each.

        ``height``, ``width``: one int, or one per document. ``ranks``: rows and columns of the grid of ranks,
        with product cp; by default, for each document, the grid whose blocks are nearest to squares.
        Positions are 2-D: ``[T/cp, 2]``, row and column in the frame.
        """
        from .grid import Grid2D

        return Grid2D.of(height, width, ranks)

    @staticmethod
    def custom(indices: Sequence[Sequence[int]] | torch.Tensor) -> Partition:
        """``indices[r]``: the packed rows that rank r holds, in its order; for batches of that T only.

        Every packed row must occur exactly once, and every rank must get as many; :class:`UBShapeError`
        otherwise.
        """
        return Custom.of(indices)

    @abstractmethod
    def offsets(self, batch: PackedBatch, rank: int) -> torch.Tensor:
        """``[T/cp]``: for every local row its position in its own sequence, padding counted on."""

    def indices(self, batch: PackedBatch, rank: int) -> torch.Tensor:
        """``[T/cp]``: the packed row of every local row."""
        starts = torch.tensor(batch.cu_seqlens_padded[:-1])
        return starts.repeat_interleave(_local_lengths(batch)) + self.offsets(batch, rank)

    def rank_major(self, batch: PackedBatch) -> torch.Tensor:
        """``[T]``: the indices of all ranks, one after another."""
        return torch.cat([self.indices(batch, rank) for rank in range(batch.cp)])

    def inverse(self, batch: PackedBatch) -> torch.Tensor:
        """``[T]``: where each packed row lies in the concatenation of all ranks' rows, in rank order.

        With every rank's ``local_r = packed[indices(batch, r)]``: ``cat(local_0, ...)[inverse]`` is
        ``packed``.
        """
        rows = self.rank_major(batch)
        inverse = torch.empty_like(rows)
        inverse[rows] = torch.arange(len(rows))
        return inverse

    def positions(self, batch: PackedBatch, rank: int) -> torch.Tensor:
        """``[T/cp]`` positions for rotary embeddings (``[T/cp, 2]`` of a grid), from 0 in every sequence."""
        return self.offsets(batch, rank)

    def real_rows(self, batch: PackedBatch, rank: int) -> torch.Tensor:
        """``[T/cp]`` bool: whether a local row holds a real token."""
        lengths = torch.tensor(batch.seqlens).repeat_interleave(_local_lengths(batch))
        return self.offsets(batch, rank) < lengths

    def real_counts(self, batch: PackedBatch, rank: int) -> tuple[tuple[int, int], ...]:
        """For each entry the real tokens in the first and in the second half of this rank's rows."""
        ends = torch.tensor(self.cu_seqlens_padded(batch)).unsqueeze(1)
        middles = ends[:-1] + torch.tensor([first for first, _ in _half_lengths(batch)]).unsqueeze(1)
        seen = torch.cat([torch.zeros(1, dtype=torch.int64), self.real_rows(batch, rank).cumsum(0)])
        counts = seen[torch.cat([ends[:-1], middles, ends[1:]], dim=1)].diff(dim=1)
        return tuple((int(first), int(second)) for first, second in counts.tolist())

    def cu_seqlens(self, batch: PackedBatch, rank: int, half: Half = "both") -> tuple[int, ...]:
        """Cumulative real tokens on this rank, of its rows or of one half of them."""
        return tuple(accumulate(_of_half(self.real_counts(batch, rank), half), initial=0))

    def cu_seqlens_padded(self, batch: PackedBatch, half: Half = "both") -> tuple[int, ...]:
        """Cumulative rows on a rank, the same on every one, of its rows or of one half of them."""
        return tuple(accumulate(_of_half(_half_lengths(batch), half), initial=0))

    def check(self, mask: str, batch: PackedBatch | None = None, engine: Engine = "ub_dynamic") -> Mask:
        """The mask's THD name if this partition is exact for it, else :class:`UBUnsupportedError`.

        ``engine``: whose ring computes it. TE derives the real tokens on a rank from the zigzag, so under any
        other partition it is exact only for a ``batch`` without padding.
        """
        name = _THD_NAMES.get(mask, mask)
        if name not in ("padding", "padding_causal"):
            raise UBUnsupportedError(
                f"mask {mask!r} with context parallelism on packed sequences: only 'padding' and "
                f"'padding_causal' are exact, as the ring cuts keys without regard to windows, biases or "
                f"bottom-right alignment"
            )
        if name not in self.exact_masks:
            raise UBUnsupportedError(
                f"mask {mask!r} with partition {self.name!r}: a causal ring takes whole chunks as visible or "
                f"not, which holds for 'zigzag' only; {self.name!r} is exact for "
                f"{', '.join(sorted(self.exact_masks))}"
            )
        if engine == "te" and self.name != "zigzag" and batch is not None and batch.has_padding:
            raise UBUnsupportedError(
                f"partition {self.name!r} on a padded batch with TE's ring: TE counts the real tokens of a "
                f"rank by the zigzag rule (get_cu_seqlens_on_cp_rank); take lengths that are multiples of "
                f"2*cp = {2 * batch.cp} and tail='ghost', or this package's attention"
            )
        return "padding" if name == "padding" else "padding_causal"


class _Chunks(Partition):
    """A rank holds two of the ``2*cp`` chunks of every sequence, whatever their numbers."""

    @abstractmethod
    def chunks(self, cp: int, rank: int) -> tuple[int, int]:
        """The numbers of the two chunks of ``rank``, in the order in which it stores them."""

    def offsets(self, batch: PackedBatch, rank: int) -> torch.Tensor:
        check_rank(batch, rank)
        padded = torch.tensor(batch.padded)
        starts, lengths = [], []
        for chunk in self.chunks(batch.cp, rank):
            starts.append(padded * chunk // (2 * batch.cp))
            lengths.append(padded * (chunk + 1) // (2 * batch.cp) - starts[-1])
        return _ranges(torch.stack(starts, dim=1).flatten(), torch.stack(lengths, dim=1).flatten())

    def real_counts(self, batch: PackedBatch, rank: int) -> tuple[tuple[int, int], ...]:
        # As in the base class, but without touching T rows: the real tokens lead every chunk.
        check_rank(batch, rank)
        first, second = self.chunks(batch.cp, rank)
        parts = 2 * batch.cp
        return tuple(
            (_overlap(length, rows, first, parts), _overlap(length, rows, second, parts))
            for length, rows in zip(batch.seqlens, batch.padded, strict=True)
        )


@dataclass(frozen=True)
class Zigzag(_Chunks):
    name: ClassVar[str] = "zigzag"
    exact_masks: ClassVar[frozenset[str]] = frozenset({"padding", "padding_causal"})

    def chunks(self, cp: int, rank: int) -> tuple[int, int]:
        return rank, 2 * cp - 1 - rank


@dataclass(frozen=True)
class Contiguous(_Chunks):
    name: ClassVar[str] = "contiguous"

    def chunks(self, cp: int, rank: int) -> tuple[int, int]:
        return 2 * rank, 2 * rank + 1


@dataclass(frozen=True, eq=False)
class Custom(Partition):
    """``rows``: int64 ``[cp, T/cp]``, a permutation of all packed rows. Equal to itself only."""

    rows: torch.Tensor
    name: ClassVar[str] = "custom"

    @classmethod
    def of(cls, indices: Sequence[Sequence[int]] | torch.Tensor) -> Custom:
        if not isinstance(indices, torch.Tensor):
            counts = [len(rows) for rows in indices]
            if len(set(counts)) != 1:
                raise UBShapeError(f"custom indices hold {counts} rows: every rank must get as many")
            indices = torch.tensor([list(rows) for rows in indices])
        if indices.dim() != 2 or indices.is_floating_point() or indices.device.type != "cpu":
            raise UBShapeError(
                f"custom indices must be ints on the CPU, [cp, T/cp], got shape {tuple(indices.shape)} and "
                f"dtype {indices.dtype} on {indices.device}"
            )
        rows = indices.to(torch.int64, copy=True)
        in_order = rows.flatten().sort().values
        wrong = (in_order != torch.arange(rows.numel())).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise UBShapeError(
                f"custom indices must hold every packed row 0 .. {rows.numel() - 1} exactly once: row {at} "
                f"{'is missing' if in_order[at] > at else f'is followed by another {int(in_order[at])}'}"
            )
        return cls(rows)

    def indices(self, batch: PackedBatch, rank: int) -> torch.Tensor:
        check_rank(batch, rank)
        cp, local = self.rows.shape
        if (cp, local) != (batch.cp, batch.local_tokens):
            raise UBShapeError(
                f"custom indices are [cp, T/cp] = [{cp}, {local}], the batch has [{batch.cp}, {batch.local_tokens}]"
            )
        rows = self.rows[rank]
        ends = torch.tensor(batch.cu_seqlens_padded[1:])
        sequence = torch.searchsorted(ends, rows, right=True)
        expected = torch.arange(len(batch.padded)).repeat_interleave(_local_lengths(batch))
        wrong = (sequence != expected).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise UBUnsupportedError(
                f"custom indices of rank {rank}: local row {at} is packed row {int(rows[at])} of sequence "
                f"{int(sequence[at])}, expected one of sequence {int(expected[at])}; every rank must hold "
                f"padded / cp rows of every sequence, sequences in order, or attention would mix or miss keys"
            )
        return rows.clone()

    def offsets(self, batch: PackedBatch, rank: int) -> torch.Tensor:
        starts = torch.tensor(batch.cu_seqlens_padded[:-1])
        return self.indices(batch, rank) - starts.repeat_interleave(_local_lengths(batch))


def check_rank(batch: PackedBatch, rank: int) -> None:
    """``rank`` is one of the batch's ``cp`` ranks, or :class:`UBShapeError`."""
    if not 0 <= rank < batch.cp:
        raise UBShapeError(f"rank {rank}: a batch with cp = {batch.cp} has ranks 0 .. {batch.cp - 1}")


def _local_lengths(batch: PackedBatch) -> torch.Tensor:
    return torch.tensor(batch.padded) // batch.cp


def _half_lengths(batch: PackedBatch) -> list[tuple[int, int]]:
    # Equal, except without context parallelism, where a length may be odd.
    local = [rows // batch.cp for rows in batch.padded]
    return [(rows // 2, rows - rows // 2) for rows in local]


def _of_half(pairs: Sequence[tuple[int, int]], half: Half) -> list[int]:
    if half == "both":
        return [first + second for first, second in pairs]
    if half not in ("first", "second"):
        raise UBShapeError(f"half = {half!r}: it must be 'both', 'first' or 'second'")
    return [pair[half == "second"] for pair in pairs]


def _overlap(length: int, rows: int, chunk: int, parts: int) -> int:
    """How many of the first ``length`` of ``rows`` rows lie in chunk number ``chunk`` of ``parts``."""
    start, stop = rows * chunk // parts, rows * (chunk + 1) // parts
    return min(max(length - start, 0), stop - start)


def _ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """``start, start+1, ...`` (``length`` of them) for each pair, concatenated."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)

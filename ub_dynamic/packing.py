# SPDX-License-Identifier: Apache-2.0
"""PackedBatch: everything that the host can know about one packed (THD) microbatch, before it is enqueued.

Words: a *sequence* has a real length and a padded length, its rows in memory. ``cu_seqlens`` holds the real
boundaries, ``cu_seqlens_padded`` the boundaries in memory, and its last entry is T, the rows of the packed
tensor over all context-parallel (CP) ranks: there is never an uncovered tail. One CP rank holds ``T / cp``
rows; that is what a tensor-parallel (TP) group and its communicators see.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from . import metadata
from .errors import UBShapeError
from .packing_rules import (
    Tail,
    as_count,
    as_counts,
    boundary_lengths,
    check_entries,
    check_total,
    cover_tail,
    document_lengths,
    integers,
    optional_counts,
    round_up,
    sequence_multiple,
    valid_total,
)

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

Lengths = Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One packed microbatch: immutable, hashable, picklable, Python ints only. The unit is tokens.

    Make one with :meth:`from_lengths` or :meth:`from_cu_seqlens`. ``seqlens``: real length of every entry, as
    attention sees it. ``padded``: its rows in memory. ``documents``: the first so many entries are the
    caller's; the rest are ghosts that cover the tail, and empty slots. ``max_seqlen``: at least the longest
    padded entry, and a multiple of ``2*cp`` when cp > 1, as TE's ring divides it without rounding up.
    ``tp``, ``cp``, ``align``, ``capacity``: what T was made valid for, see :mod:`ub_dynamic.packing_rules`.
    """

    seqlens: tuple[int, ...]
    padded: tuple[int, ...]
    documents: int
    max_seqlen: int
    tp: int = 1
    cp: int = 1
    align: int = 1
    capacity: int | None = None

    @classmethod
    def from_lengths(
        cls,
        lengths: Lengths,
        *,
        tp: int = 1,
        cp: int = 1,
        align: int = 1,
        capacity: int | None = None,
        bucket: int | None = None,
        tail: Tail = "ghost",
        slots: int | None = None,
        max_seqlen: int | None = None,
    ) -> PackedBatch:
        """Lay out documents of these lengths: each padded to ``2*cp`` (not at cp 1), then the tail covered.

        ``align``: tokens on one CP rank come in multiples of it: the communicators' ``token_multiple()``.
        ``capacity``: largest T, that is ``cp`` times the tokens that the communicators are registered for.
        ``bucket``: T is rounded up to a multiple of it, with the capacity as the last bucket, so that a few
        CUDA graphs serve all batches; likewise ``slots`` fixes the number of entries by adding empty ones,
        and ``max_seqlen`` fixes that fact.

        ``tail``: how the rows between the last document and T are covered.

        - ``"ghost"``: by extra sequences. Where no document is padded they count as real and attend among
          themselves, so ``pad_between_seqs`` stays False: the fast path, and the only one that
          FlashAttention 2 has. Where the batch is padded anyway their real length is 0 and they cost
          nothing. They are cut into pieces of about 128 tokens and touch no document; keep their rows,
          ``real_rows_end`` to T, out of the loss.
        - ``"ghost_padding"``: by extra sequences of real length 0, always.
        - ``"extend_last"``: by more padding of the last document.
        - ``"error"``: not at all; :class:`UBAlignmentError` names the next valid T.

        Documents of length 0 are fine, a batch without any token is not. Raises :class:`UBShapeError`,
        :class:`UBAlignmentError` or :class:`UBCapacityError`, and :class:`UBUnsupportedError` for a tensor on
        a device, as reading it would synchronise.
        """
        if isinstance(lengths, torch.Tensor):
            lengths = metadata.host_list(lengths, "lengths")
        seqlens = document_lengths(lengths)
        tp, cp, align = as_counts(tp=tp, cp=cp, align=align)
        capacity, bucket = optional_counts(capacity=capacity, bucket=bucket)
        slots, max_seqlen = optional_counts(slots=slots, max_seqlen=max_seqlen)
        unit = sequence_multiple(cp)
        padded = seqlens if unit == 1 else tuple(round_up(length, unit) for length in seqlens)
        total = valid_total(sum(padded), len(padded), tp, cp, align, capacity, bucket)
        entries = cover_tail(seqlens, padded, total, unit, tail, slots, max_seqlen)
        longest = max(entries[1]) if max_seqlen is None else max_seqlen
        return cls(*entries, len(seqlens), longest, tp, cp, align, capacity)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Lengths,
        cu_seqlens_padded: Lengths | None = None,
        *,
        total_tokens: int | None = None,
        tp: int = 1,
        cp: int = 1,
        align: int = 1,
        capacity: int | None = None,
        tail: Tail = "ghost",
        slots: int | None = None,
        max_seqlen: int | None = None,
        allow_sync: bool = False,
    ) -> PackedBatch:
        """Describe a layout that exists already, by boundaries as TE has them, starting with 0.

        No entry is moved, so with cp > 1 each must take a multiple of ``2*cp`` rows. ``total_tokens``: rows
        of the packed tensors where they are more than the last boundary, a valid T; by default the next
        valid T. Either way ``tail`` covers what is beyond the last boundary. The rest is as in
        :meth:`from_lengths`. A tensor on a device is read only with ``allow_sync=True`` (one
        synchronisation each; :class:`UBStateError` during graph capture).
        """
        seqlens = _lengths_between(cu_seqlens, "cu_seqlens", allow_sync)
        padded = seqlens
        if cu_seqlens_padded is not None and cu_seqlens_padded is not cu_seqlens:
            padded = _lengths_between(cu_seqlens_padded, "cu_seqlens_padded", allow_sync)
        tp, cp, align = as_counts(tp=tp, cp=cp, align=align)
        capacity, total_tokens = optional_counts(capacity=capacity, total_tokens=total_tokens)
        slots, max_seqlen = optional_counts(slots=slots, max_seqlen=max_seqlen)
        check_entries(seqlens, padded, cp)
        filled = sum(padded)
        if total_tokens is None:
            total = valid_total(filled, len(padded), tp, cp, align, capacity, bucket=None)
        elif total_tokens < filled:
            raise UBShapeError(f"total_tokens = {total_tokens}: it must be at least the last boundary, {filled}")
        else:
            total = total_tokens
            check_total(total, len(padded), tp, cp, align, capacity)
        entries = cover_tail(seqlens, padded, total, sequence_multiple(cp), tail, slots, max_seqlen)
        longest = max(entries[1]) if max_seqlen is None else max_seqlen
        return cls(*entries, len(seqlens), longest, tp, cp, align, capacity)

    def __post_init__(self) -> None:
        for name in ("seqlens", "padded"):
            object.__setattr__(self, name, integers(getattr(self, name), name))
        for name in ("documents", "max_seqlen", "tp", "cp", "align", "capacity"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and (name, value) != ("capacity", None):
                object.__setattr__(self, name, as_count(name, value))
        check_entries(self.seqlens, self.padded, self.cp)
        check_total(self.total_tokens, len(self.padded), self.tp, self.cp, self.align, self.capacity)
        if not 0 < self.documents <= len(self.padded):
            raise UBShapeError(
                f"documents = {self.documents}: it must be in 1 .. {len(self.padded)}, the number of entries"
            )
        unit, longest = sequence_multiple(self.cp), max(self.padded)
        if self.max_seqlen < longest or self.max_seqlen % unit:
            raise UBShapeError(
                f"max_seqlen = {self.max_seqlen}: it must be a multiple of {unit} and at least the longest "
                f"padded sequence, {longest}; the next valid value is "
                f"{round_up(max(self.max_seqlen, longest), unit)}"
            )

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Real boundaries ``(0, L_0, L_0 + L_1, ...)``, one more than there are entries."""
        return tuple(accumulate(self.seqlens, initial=0))

    @cached_property
    def cu_seqlens_padded(self) -> tuple[int, ...]:
        """Boundaries in memory; the last one is T, always."""
        return tuple(accumulate(self.padded, initial=0))

    @cached_property
    def total_tokens(self) -> int:
        """T: rows of the packed tensor over all CP ranks."""
        return sum(self.padded)

    @property
    def local_tokens(self) -> int:
        """``T / cp``: rows on one CP rank, which is T for its TP group and the communicators."""
        return self.total_tokens // self.cp

    @cached_property
    def has_padding(self) -> bool:
        """Whether any entry has rows beyond its real length, the last entry included."""
        return self.seqlens != self.padded

    @property
    def pad_between_seqs(self) -> bool:
        """TE's flag: False exactly if every real length equals its padded length, the last one included.

        With False TE takes ``cu_seqlens // cp`` for the lengths on a rank, which drops real keys as soon as
        one entry is padded, even if that is the last one (TE issue #3331).
        """
        return self.has_padding

    @cached_property
    def real_tokens(self) -> int:
        """Tokens of documents: T without padding and ghosts."""
        return sum(self.seqlens[: self.documents])

    @property
    def real_rows_end(self) -> int:
        """The first row behind the documents; from there to T lie ghosts only."""
        return self.cu_seqlens_padded[self.documents]

    @property
    def padding_fraction(self) -> float:
        """Share of the T rows that hold no token of a document."""
        return 1 - self.real_tokens / self.total_tokens

    def shape_key(self, *extra: Hashable) -> tuple[Hashable, ...]:
        """What a CUDA graph bakes in: batches with equal keys may replay one graph.

        ``extra``: what else differs between graphs, such as the partition or the CP communication type.
        """
        entries = len(self.padded)
        return (self.local_tokens, entries, self.max_seqlen, self.pad_between_seqs, self.tp, self.cp, *extra)

    def pack(self, documents: Iterable[torch.Tensor], fill: float = 0) -> torch.Tensor:
        """The packed tensor ``[T, ...]``: document i in its rows, ``fill`` in padding and ghosts. Gradients go through.

        ``documents``: a tensor ``[seqlens[i], ...]`` for each document; :class:`UBShapeError` otherwise.
        """
        given = list(documents)
        if len(given) != self.documents:
            raise UBShapeError(f"got {len(given)} tensors, the batch has {self.documents} documents")
        pieces: list[torch.Tensor] = []
        end = 0
        for index, (document, start) in enumerate(zip(given, self.cu_seqlens_padded, strict=False)):
            if not isinstance(document, torch.Tensor):
                raise UBShapeError(f"documents[{index}] is a {type(document).__name__}, not a tensor")
            expected = (self.seqlens[index], *given[0].shape[1:])
            if document.shape != expected:
                raise UBShapeError(f"documents[{index}] has shape {tuple(document.shape)}, expected {expected}")
            pieces += [given[0].new_full((start - end, *expected[1:]), fill), document]
            end = start + self.seqlens[index]
        return torch.cat([*pieces, given[0].new_full((self.total_tokens - end, *given[0].shape[1:]), fill)])

    def unpack(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Views of the documents' real rows in ``packed`` ``[T, ...]``."""
        if packed.shape[0] != self.total_tokens:
            raise UBShapeError(f"got {packed.shape[0]} rows: this batch has T = {self.total_tokens}")
        starts = self.cu_seqlens_padded[: self.documents]
        return [packed[start : start + length] for start, length in zip(starts, self.seqlens, strict=False)]

    def device_metadata(self, device: torch.device | str) -> metadata.DeviceMetadata:
        """The boundaries on a device: one asynchronous copy on the current stream, then cached in this batch.

        :class:`UBStateError` if that copy would fall into a CUDA graph capture.
        """
        where = metadata.indexed(device)
        if where not in self._on_device:
            self._on_device[where] = metadata.copy_boundaries(where, self.cu_seqlens, self.cu_seqlens_padded)
        return self._on_device[where]

    def dpa_kwargs(self, device: torch.device | str, causal: bool = True) -> dict[str, Any]:
        """Keyword arguments for ``te.DotProductAttention.forward``: nothing is left for TE to read or guess.

        q and kv share tensor objects, real and padded boundaries too where nothing is padded. Raises
        :class:`UBCapacityError` for more than TE's kernels can index.
        """
        mask = "padding_causal" if causal else "padding"
        return {**self._packed_sequence_fields(device), "attn_mask_type": mask}

    def to_megatron(self, device: torch.device | str) -> PackedSeqParams:
        """Megatron's ``PackedSeqParams``, with the fields that the installed version has.

        Its ``total_tokens`` stays unset, since Megatron would then build ``seq_idx`` with a synchronisation.
        :class:`UBUnsupportedError` without megatron-core, or with one that cannot express this batch.
        """
        return metadata.packed_seq_params(self._packed_sequence_fields(device), self.has_padding)

    def _packed_sequence_fields(self, device: torch.device | str) -> dict[str, Any]:
        metadata.check_te_limits(len(self.padded), self.total_tokens, self.cp)
        on_device = self.device_metadata(device)
        return {
            "qkv_format": "thd",
            "cu_seqlens_q": on_device.cu_seqlens,
            "cu_seqlens_kv": on_device.cu_seqlens,
            "cu_seqlens_q_padded": on_device.cu_seqlens_padded,
            "cu_seqlens_kv_padded": on_device.cu_seqlens_padded,
            "max_seqlen_q": self.max_seqlen,
            "max_seqlen_kv": self.max_seqlen,
            "pad_between_seqs": self.pad_between_seqs,
        }

    @cached_property
    def _on_device(self) -> dict[torch.device, metadata.DeviceMetadata]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # The facts only: what is cached, tensors above all, does not travel to another process.
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _lengths_between(boundaries: Lengths, what: str, allow_sync: bool) -> tuple[int, ...]:
    if isinstance(boundaries, torch.Tensor):
        boundaries = metadata.host_list(boundaries, what, allow_sync)
    return boundary_lengths(boundaries, what)

# SPDX-License-Identifier: Apache-2.0
"""TE's ``pad_between_seqs``, decided on the host: False exactly if every real boundary equals its padded one.

Where the flag is None, TE compares objects: boundaries that are equal but distinct count as padded and take the slow
path (TE issue #3487). Comparing all but the last, as TE before 2.18 did, is wrong the other way: with a padded last
sequence the fast path drops real keys (TE issue #3331). Neither is needed where the lengths are known.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Literal, NamedTuple, get_args

import torch

from ..errors import UBShapeError, UBStateError
from .current import batch_of

Policy = Literal["conservative", "sync_once", "error"]
Source = Literal["explicit", "not THD", "no padded boundaries", "alias", "packed batch", "remembered", "policy", "read"]
Boundaries = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]

_REMEMBERED = 64  # verdicts, more than the microbatches in flight of any pipeline schedule


class Verdict(NamedTuple):
    """The flag, and what decided it."""

    pad_between_seqs: bool
    source: Source


def check_policy(policy: object) -> None:
    """Raise :class:`UBShapeError` for what is no :data:`Policy`."""
    if policy not in get_args(Policy):
        raise UBShapeError(f"policy = {policy!r}: it must be one of {', '.join(map(repr, get_args(Policy)))}")


class PadResolver:
    """Decides the flag; remembers verdicts for tensors that it has seen, so that recomputation gets the same one.

    ``policy`` for tensors that nothing is known about: ``"conservative"`` takes True, which is always right and what
    TE does; ``"sync_once"`` reads them from the device, one synchronisation for each set of tensors;
    ``"error"`` raises :class:`UBStateError`.
    """

    def __init__(self, policy: Policy = "conservative") -> None:
        check_policy(policy)
        self.policy: Policy = policy
        # Keeps the tensors alive, so that an address cannot come to mean other boundaries.
        self._remembered: OrderedDict[tuple[object, ...], tuple[Verdict, Boundaries]] = OrderedDict()

    def resolve(
        self,
        boundaries: Boundaries,
        *,
        explicit: bool | None = None,
        qkv_format: str = "thd",
        rows: int | None = None,
    ) -> Verdict:
        """``boundaries``: cu_seqlens_q, cu_seqlens_kv and their padded ones. ``rows``: T over all CP ranks, if known.

        Raises :class:`UBShapeError` where ``rows`` are known not to end with the last boundary, and
        :class:`UBStateError` where the policy says so, or would read during graph capture.
        """
        verdict = self._known(boundaries, explicit, qkv_format)
        batch = batch_of(*boundaries) if qkv_format == "thd" else None
        if batch is not None:
            check_tail(batch.total_tokens, rows)
            if verdict is None:
                verdict = self._remember(boundaries, Verdict(batch.pad_between_seqs, "packed batch"))
        if verdict is not None:
            return verdict
        if not capturing() and (seen := self._remembered.get(_key(boundaries))) is not None:
            self._remembered.move_to_end(_key(boundaries))
            return Verdict(seen[0].pad_between_seqs, "remembered")
        return self._by_policy(boundaries, rows)

    def forget(self) -> None:
        """Drop all verdicts, and the tensors that they belong to."""
        self._remembered.clear()

    def _known(self, boundaries: Boundaries, explicit: bool | None, qkv_format: str) -> Verdict | None:
        q, kv, q_padded, kv_padded = boundaries
        if explicit is not None:
            return Verdict(bool(explicit), "explicit")
        if qkv_format != "thd":
            return Verdict(False, "not THD")
        if q_padded is None and kv_padded is None:
            return Verdict(False, "no padded boundaries")
        if _same(q, q_padded) and _same(kv, kv_padded):
            return self._remember(boundaries, Verdict(False, "alias"))
        return None

    def _by_policy(self, boundaries: Boundaries, rows: int | None) -> Verdict:
        if self.policy == "conservative":
            return Verdict(True, "policy")
        if self.policy == "error":
            raise UBStateError(
                "pad_between_seqs is not known for these boundaries: pass it, use PackedBatch.dpa_kwargs(), or call "
                "inside `with packed(batch)`"
            )
        if capturing():
            raise UBStateError(
                "policy='sync_once' would read boundaries from the device during CUDA graph capture: pass "
                "pad_between_seqs, or call inside `with packed(batch)`"
            )
        padded, end = _read(boundaries)
        check_tail(end, rows)
        return self._remember(boundaries, Verdict(padded, "read"))

    def _remember(self, boundaries: Boundaries, verdict: Verdict) -> Verdict:
        # A graph's static buffers change their values by replay, which no version counter shows.
        if not capturing():
            self._remembered[_key(boundaries)] = (verdict, boundaries)
            while len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        return verdict


def resolve_pad_between_seqs(
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_kv: torch.Tensor | None,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    *,
    explicit: bool | None = None,
    qkv_format: str = "thd",
    policy: Policy = "conservative",
    rows: int | None = None,
) -> bool:
    """TE's ``pad_between_seqs`` for one call, without memory; see :class:`PadResolver`."""
    boundaries = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    verdict = PadResolver(policy).resolve(boundaries, explicit=explicit, qkv_format=qkv_format, rows=rows)
    return verdict.pad_between_seqs


def check_tail(end: int, rows: int | None) -> None:
    """The packed tensor ends with the last padded boundary ``end``, or :class:`UBShapeError`."""
    if rows is None or rows == end:
        return
    if rows > end:
        raise UBShapeError(
            f"{rows} packed rows over all context-parallel ranks, and the last padded boundary is {end}: the tail of "
            f"{rows - end} rows belongs to no sequence. TE 2.20's ring attention ends there in a device-side assert "
            f"(get_thd_padding_mask), its all-to-all and all-gather mix rows; cover the tail with a ghost sequence, as "
            f"PackedBatch does"
        )
    raise UBShapeError(
        f"{rows} packed rows over all context-parallel ranks, fewer than the last padded boundary, {end}; where rows "
        f"are split among ranks, set_context_parallel_group must have come before the call"
    )


def capturing() -> bool:
    """Whether a CUDA graph is being captured, by torch's account or by TE's own flag."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    te_graph = sys.modules.get("transformer_engine.pytorch.graph")
    return te_graph is not None and bool(te_graph.is_graph_capturing())


def _same(real: torch.Tensor | None, padded: torch.Tensor | None) -> bool:
    """Whether two tensors are one memory; detached copies are."""
    if real is None or padded is None or real is padded:
        return real is padded
    return (real.data_ptr(), real.shape, real.stride()) == (padded.data_ptr(), padded.shape, padded.stride())


def _key(boundaries: Boundaries) -> tuple[object, ...]:
    return tuple(
        None if one is None else (one.data_ptr(), one._version, tuple(one.shape), one.device) for one in boundaries
    )


def _read(boundaries: Boundaries) -> tuple[bool, int]:
    """Whether any entry is padded, and the last padded boundary of q, in one read of the device."""
    q, kv, q_padded, kv_padded = boundaries
    if q is None or kv is None:
        raise UBShapeError("cu_seqlens_q and cu_seqlens_kv are needed in the THD format")
    q_padded, kv_padded = (real if padded is None else padded for real, padded in ((q, q_padded), (kv, kv_padded)))
    both = torch.stack([(q != q_padded).any(), (kv != kv_padded).any()]).any()
    padded, end = torch.stack([both.to(q_padded.dtype), q_padded[-1]]).tolist()
    return bool(padded), int(end)

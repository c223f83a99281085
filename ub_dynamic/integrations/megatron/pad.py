# SPDX-License-Identifier: Apache-2.0
"""``pad_between_seqs`` of Megatron's ``PackedSeqParams``, filled in where the caller left it open.

megatron-core 0.17 and newer have the field and hand it to TE; older ones do not, and there TE's attention class is
given it directly.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ...cp.pad_flag import PadResolver, Policy
from ...cp.pad_hooks import PadHandle, install_pad_resolver

_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


class PadFlags:
    """Fills the flag in, once a microbatch, until :meth:`remove`. ``policy`` as in :class:`PadResolver`."""

    def __init__(self, packed_seq_params: type, policy: Policy) -> None:
        self._resolver = PadResolver(policy)
        self._handle: PadHandle | None = None
        self.on_dataclass = "pad_between_seqs" in {field.name for field in fields(packed_seq_params)}
        if not self.on_dataclass:
            from transformer_engine.pytorch import DotProductAttention

            self._handle = install_pad_resolver(DotProductAttention, policy)

    def fill(self, params: Any, tokens: int, config: Any) -> None:
        """Set the flag of ``params`` if it is None. ``tokens``: T on one context-parallel rank.

        Raises :class:`UBShapeError` where the rows are known not to end with the last padded boundary.
        """
        if params is None or not self.on_dataclass or getattr(params, "pad_between_seqs", None) is not None:
            return
        q, kv, q_padded, kv_padded = (getattr(params, name) for name in _BOUNDARIES)
        verdict = self._resolver.resolve(
            (q, kv, q_padded, kv_padded),
            qkv_format=params.qkv_format or "thd",
            rows=tokens * _context_parallel_size(params, config),
        )
        params.pad_between_seqs = verdict.pad_between_seqs

    def remove(self) -> None:
        """Take everything back."""
        if self._handle is not None:
            self._handle.remove()
        self._resolver.forget()


def _context_parallel_size(params: Any, config: Any) -> int:
    """Megatron may give a microbatch a context-parallel group of its own."""
    group = getattr(params, "cp_group", None)
    if group is not None:
        return int(group.size())
    local = getattr(params, "local_cp_size", None)
    return int(config.context_parallel_size if local is None else local)

# SPDX-License-Identifier: Apache-2.0
"""Move rows of a packed tensor: one launch each, in the widest word that the rows allow."""

from __future__ import annotations

import torch

_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16)  # 16, 8, 4, 2 bytes


def take_rows(source: torch.Tensor, index: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """``source[index]`` for ``source`` ``[rows, ...]`` (2-D: rows may be strided); None is the identity.

    ``index``: int32 or int64 on the same device. ``out``: where to write, with the result's shape and dtype. Rows are
    moved as 16-byte words where sizes and addresses allow, which is several times faster for 2-byte types.
    """
    if index is None:
        return source.contiguous() if out is None else out.copy_(source)
    if out is None:
        out = source.new_empty((index.shape[0], *source.shape[1:]))
    wide_source, wide_out = _same_words(_flat(source), _flat(out))
    torch.index_select(wide_source, 0, index, out=wide_out)
    return out


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.shape[0], -1) if tensor.dim() != 2 else tensor


def _same_words(source: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for word in _WORDS:
        if word.itemsize >= source.element_size() and _fits(source, word) and _fits(out, word):
            return source.view(word), out.view(word)
    return source, out


def _fits(tensor: torch.Tensor, word: torch.dtype) -> bool:
    size, item = word.itemsize, tensor.element_size()
    rows, width = tensor.shape
    starts = [tensor.storage_offset() * item, width * item] + ([tensor.stride(0) * item] if rows > 1 else [])
    return tensor.stride(1) == 1 and all(start % size == 0 for start in starts)

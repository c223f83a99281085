# SPDX-License-Identifier: Apache-2.0
"""Packed-batch metadata on a device, in one asynchronous copy, and in the forms that TE and Megatron take.

Works on plain host data, so that :mod:`ub_dynamic.packing` can stand on it. Nothing here reads from a device,
except :func:`host_list` where the caller asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from .errors import UBCapacityError, UBShapeError, UBStateError, UBUnsupportedError

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

# Each THD kernel of context_parallel.cu stages one int a boundary in 48 KiB of shared memory.
MAX_CP_SEQUENCES = 48 * 1024 // 4 - 1
_ALIGN = 64  # int32 elements between two arrays in the one buffer, so that each starts at 256 bytes


@dataclass(frozen=True, eq=False)
class DeviceMetadata:
    """int32 boundaries on a device; ``cu_seqlens_padded`` is the same object where nothing is padded."""

    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor


def copy_boundaries(device: torch.device, real: Sequence[int], padded: Sequence[int]) -> DeviceMetadata:
    """Copy both boundary arrays at once: one pinned buffer, one non-blocking copy on the current stream.

    Other streams that use the tensors have to wait for the current one. :class:`UBStateError` during CUDA
    graph capture: the graph would replay the copy of a host buffer that is gone.
    """
    if real == padded:
        (both,) = copy_ints(device, real)
        return DeviceMetadata(both, both)
    return DeviceMetadata(*copy_ints(device, real, padded))


def copy_ints(device: torch.device, *arrays: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Each of ``arrays`` as int32 on ``device``, all in one copy; errors as :func:`copy_boundaries`."""
    on_cuda = device.type == "cuda"
    if on_cuda and torch.cuda.is_current_stream_capturing():
        raise UBStateError(
            "packed-batch metadata cannot be copied during CUDA graph capture: call the same method once "
            "before the capture starts"
        )
    flat: list[int] = []
    starts: list[int] = []
    for array in arrays:
        flat += [0] * (-len(flat) % _ALIGN)
        starts.append(len(flat))
        flat += array
    # The caching host allocator keeps the pinned block until the copy has run.
    buffer = torch.tensor(flat, dtype=torch.int32, pin_memory=on_cuda).to(device, non_blocking=True)
    return tuple(buffer[start : start + len(array)] for start, array in zip(starts, arrays, strict=True))


def indexed(device: torch.device | str) -> torch.device:
    """``device`` with its index, so that ``"cuda"`` and ``"cuda:0"`` are one key."""
    where = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(where) == "cuda" else where


def host_list(tensor: torch.Tensor, what: str, allow_sync: bool = False) -> list[int]:
    """A 1-D integer tensor as a list. One on a device is refused unless ``allow_sync``."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise UBShapeError(
            f"{what} must be 1-D and hold integers, got shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
        )
    if tensor.device.type != "cpu":
        if not allow_sync:
            raise UBUnsupportedError(
                f"{what} is a tensor on {tensor.device}: reading it would wait for the device; keep the "
                f"lengths on the host, or accept one synchronisation with from_cu_seqlens(..., "
                f"allow_sync=True)"
            )
        if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UBStateError(f"{what} on {tensor.device} cannot be read during CUDA graph capture")
    return tensor.tolist()


def check_te_limits(sequences: int, total_tokens: int, cp: int) -> None:
    """What TE's THD kernels can index; :class:`UBCapacityError` otherwise."""
    if total_tokens >= 2**31:
        raise UBCapacityError(f"T = {total_tokens}: TE's boundaries are int32, T must be below 2^31")
    if cp > 1 and sequences > MAX_CP_SEQUENCES:
        raise UBCapacityError(
            f"{sequences} sequences: the context-parallel kernels of TE keep all boundaries in 48 KiB of "
            f"shared memory; the largest valid number of sequences is {MAX_CP_SEQUENCES}"
        )


def packed_seq_params(values: Mapping[str, Any], has_padding: bool) -> PackedSeqParams:
    """Megatron's ``PackedSeqParams`` with those of ``values`` that the installed version has fields for.

    Without a ``pad_between_seqs`` field TE decides by tensor identity, which is right for shared tensors.
    """
    try:
        from megatron.core.packed_seq_params import PackedSeqParams
    except ImportError as error:
        raise UBUnsupportedError(
            f"to_megatron needs Megatron's PackedSeqParams: pip install megatron-core ({error})"
        ) from error
    known = {field.name for field in fields(PackedSeqParams)}
    needed = {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"}
    if has_padding:
        needed |= {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}
    if missing := sorted(needed - known):
        raise UBUnsupportedError(
            f"the installed megatron-core has no PackedSeqParams.{', '.join(missing)}, which this batch "
            f"needs: install a newer one"
        )
    return PackedSeqParams(**{name: value for name, value in values.items() if name in known})

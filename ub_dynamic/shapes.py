# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of an active shape lie: the chunk layout as frozen data, arithmetic only.

Words: ``T`` tokens on a tensor-parallel (TP) group, ``H`` hidden size, ``tp`` ranks,
``c = T / tp * H`` elements that one rank owns. A buffer is registered once at its *capacity*
``[T_cap, H]``; the *active* shape ``[T, H]`` is a prefix of it. Both backends read the layout
from here: the host backend moves bytes by it, the native code of the TE backend must agree
with it. What Transformer Engine's kernels demand beyond the layout is in :mod:`ub_dynamic.rules`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from .errors import UBAlignmentError, UBCapacityError, UBShapeError

Method = Literal["bulk", "pipeline", "ring_exchange", "external"]
Collective = Literal["ag", "rs"]
Shape = tuple[int, int]

METHODS: tuple[Method, ...] = ("bulk", "pipeline", "ring_exchange", "external")
COLLECTIVES: tuple[Collective, ...] = ("ag", "rs")


@dataclass(frozen=True)
class CommSpec:
    """All that is fixed about one communicator when it is registered.

    ``name`` is TE's layer name (``"qkv_fprop"``), followed by ``/mode`` for another quantization mode.
    ``capacity`` is ``(T_cap, H)``. ``num_splits`` matters to ``pipeline``; ``num_sm`` and ``use_ce``
    (copy engines instead of SM copies) to ``ring_exchange``, ``aggregate`` to its all-gather.
    """

    name: str
    method: Method
    collective: Collective
    capacity: Shape
    tp: int
    dtype: torch.dtype
    num_splits: int = 4
    num_sm: int = 16
    use_ce: bool = True
    aggregate: bool = False

    def layout(self, tokens: int) -> ChunkLayout:
        """The chunk layout at ``tokens`` active tokens; errors as :func:`chunk_layout`."""
        active = (tokens, self.capacity[1])
        return chunk_layout(self.method, self.collective, self.capacity, active, self.tp, self.dtype, self.num_splits)


@dataclass(frozen=True)
class Chunk:
    """One contiguous piece of a registered buffer: ``[rows, columns]`` at ``offset`` elements."""

    index: int
    rows: int
    columns: int
    offset: int
    offset_bytes: int
    numel: int
    nbytes: int


@dataclass(frozen=True)
class ChunkLayout:
    """How the active shape is cut.

    ``view_shape``: what ``get_buffer`` returns, ``[T, H]`` except for a ring reduce-scatter, whose
    ``2*tp - 1`` chunks make ``[T/tp * (2*tp - 1), H]``. ``local_numel``: c. ``wire_numel``: elements
    that one rank sends in one collective. ``receive_slots`` and ``reduce_slots``: chunk indices of a
    ring reduce-scatter that are received, and that are summed. ``nbytes``: bytes from the start of
    the buffer that are used; ``capacity_nbytes``: bytes that are registered.
    """

    method: Method
    collective: Collective
    capacity: Shape
    active: Shape
    tp: int
    dtype: torch.dtype
    num_splits: int
    view_shape: Shape
    chunks: tuple[Chunk, ...]
    local_numel: int
    wire_numel: int
    receive_slots: tuple[int, ...]
    reduce_slots: tuple[int, ...]
    nbytes: int
    capacity_nbytes: int


def parse_shape(shape: Any, what: str = "active shape") -> Shape:
    """``shape`` as two positive Python ints ``(tokens, hidden)``; :class:`UBShapeError` otherwise.

    Lists, tuples, ``torch.Size`` and 0-dim CPU integer tensors as entries are taken. Tensors on a
    device are refused: reading one would synchronise.
    """
    form = f"{what} must be 2-D [tokens, hidden], two ints"
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        raise UBShapeError(f"{form} in a list or tuple, got {_describe(shape)}")
    if len(shape) != 2:
        raise UBShapeError(f"{form}, got {len(shape)} entries: {_describe(shape)}")
    tokens, hidden = (_checked_int(entry, form) for entry in shape)
    if tokens <= 0:
        raise _no_tokens(f"{what} [{tokens}, {hidden}]")
    if hidden <= 0:
        raise UBShapeError(f"{what} [{tokens}, {hidden}]: hidden must be positive")
    return tokens, hidden


def parse_tokens(tokens: Any) -> int:
    """A number of tokens, as :func:`parse_shape` takes it, as a positive int; :class:`UBShapeError` otherwise."""
    count = _checked_int(tokens, "a number of tokens T must be an int")
    if count <= 0:
        raise _no_tokens(f"T = {count}")
    return count


def _no_tokens(where: str) -> UBShapeError:
    return UBShapeError(f"{where}: tokens must be positive; skip the microbatch on all TP ranks instead")


def as_int(value: Any) -> int | None:
    """``value`` as a Python int, one of numpy or a 0-dim CPU integer tensor included; None for all else, a bool too."""
    if type(value) is int:
        return value
    if isinstance(value, torch.Tensor):
        on_host = value.device.type == "cpu"
        if on_host and value.dim() == 0 and not value.dtype.is_floating_point and value.dtype != torch.bool:
            return int(value.item())
    elif not isinstance(value, bool) and hasattr(value, "__index__"):
        with contextlib.suppress(TypeError):  # of an array that is no scalar
            return operator.index(value)
    return None


def _checked_int(entry: Any, form: str) -> int:
    value = as_int(entry)
    if value is not None:
        return value
    if isinstance(entry, torch.Tensor) and entry.device.type != "cpu":
        raise UBShapeError(
            f"{form}, got a tensor on {entry.device}: reading it would synchronise; keep lengths on the host"
        )
    raise UBShapeError(f"{form}, got {_describe(entry)}")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


@lru_cache(maxsize=4096)
def chunk_layout(
    method: Method,
    collective: Collective,
    capacity: Shape,
    active: Shape,
    tp: int,
    dtype: torch.dtype,
    num_splits: int = 4,
) -> ChunkLayout:
    """The chunk layout of ``active`` = ``(T, H)`` in a buffer registered at ``capacity`` = ``(T_cap, H)``.

    - bulk: view ``[T, H]``, rank r's chunk ``[T/tp, H]`` at ``r * c``.
    - pipeline (reduce-scatter): ``num_splits`` column blocks, block i is ``[T, H/num_splits]``, contiguous,
      at ``i * T * H / num_splits``.
    - ring_exchange all-gather: ``tp`` chunks ``[T/tp, H]`` at ``r * c``.
    - ring_exchange reduce-scatter: ``2*tp - 1`` such chunks; slots ``tp .. 2*tp - 2`` receive and are summed
      with slot ``tp - 1``.
    - external: as bulk; its communicators are never given an active shape.

    Raises :class:`UBShapeError` (unknown method, H differs), :class:`UBCapacityError` (T > T_cap) or
    :class:`UBAlignmentError` (T % tp, H % num_splits).
    Source of the layouts: ``comm_gemm_overlap.cpp`` of Transformer Engine.
    """
    _check_layout(method, collective, capacity, active, tp, num_splits)
    tokens, hidden = active
    itemsize = dtype.itemsize
    local_rows = tokens // tp
    local_numel = local_rows * hidden
    ring_rs = method == "ring_exchange" and collective == "rs"
    if method == "pipeline":
        rows, columns, count = tokens, hidden // num_splits, num_splits
    else:
        rows, columns, count = local_rows, hidden, (2 * tp - 1 if ring_rs else tp)
    numel = rows * columns
    chunks = tuple(
        Chunk(i, rows, columns, i * numel, i * numel * itemsize, numel, numel * itemsize) for i in range(count)
    )
    return ChunkLayout(
        method=method,
        collective=collective,
        capacity=capacity,
        active=active,
        tp=tp,
        dtype=dtype,
        num_splits=num_splits,
        view_shape=(local_rows * count if ring_rs else tokens, hidden),
        chunks=chunks,
        local_numel=local_numel,
        wire_numel=local_numel * (tp - 1),
        receive_slots=tuple(range(tp, 2 * tp - 1)) if ring_rs else (),
        reduce_slots=tuple(range(tp - 1, 2 * tp - 1)) if ring_rs else (),
        nbytes=count * numel * itemsize,
        capacity_nbytes=registered_rows(method, collective, capacity[0], tp) * hidden * itemsize,
    )


def registered_rows(method: Method, collective: Collective, tokens: int, tp: int) -> int:
    """Rows that are registered for a capacity of ``tokens``: more than T only for a ring reduce-scatter."""
    if method == "ring_exchange" and collective == "rs":
        return tokens // tp * (2 * tp - 1)
    return tokens


def _check_layout(
    method: Method, collective: Collective, capacity: Shape, active: Shape, tp: int, num_splits: int
) -> None:
    if method not in METHODS or collective not in COLLECTIVES:
        raise UBShapeError(
            f"no communicator of method {method!r} and collective {collective!r}: "
            f"methods are {', '.join(METHODS)}; collectives are {', '.join(COLLECTIVES)}"
        )
    if method == "pipeline" and collective == "ag":
        raise UBShapeError("method 'pipeline' exists for reduce-scatter only; an all-gather takes ring_exchange")
    for count, name in ((tp, "tp"), (num_splits, "num_splits"), (capacity[1], "H")):
        if count < 1:
            raise UBShapeError(f"{name} is {count}: it must be at least 1")
    tokens, hidden = active
    if hidden != capacity[1]:
        raise UBShapeError(f"active shape {list(active)}: hidden size is fixed at init: H = {capacity[1]}")
    if tokens < 1:
        raise _no_tokens(f"active shape {list(active)}")
    if tokens > capacity[0]:
        raise UBCapacityError(
            f"T = {tokens} tokens exceed the capacity of {capacity[0]}; the next valid value is {capacity[0]}"
        )
    for rows, what in ((tokens, "T"), (capacity[0], "capacity")):
        if rows % tp:
            raise UBAlignmentError(
                f"{what} = {rows} tokens cannot be split over tp = {tp} ranks; the next valid value is "
                f"{rows + tp - rows % tp}"
            )
    if method == "pipeline" and hidden % num_splits:
        raise UBAlignmentError(
            f"H = {hidden} cannot be cut into num_splits = {num_splits} equal column blocks; the next valid H is "
            f"{hidden + num_splits - hidden % num_splits}"
        )

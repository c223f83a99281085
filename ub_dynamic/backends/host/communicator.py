# SPDX-License-Identifier: Apache-2.0
"""What every host communicator has: registered memory, an active shape, and TE's methods on the buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...errors import UBShapeError
from ...shapes import ChunkLayout, CommSpec, registered_rows
from . import trace
from .buffers import Region, RegisteredMemory
from .engine import Engine


@dataclass(frozen=True)
class Extent:
    """Elements that a communicator needs: in its buffer, to receive parts of a sum in, and for float32 sums."""

    buffer: int
    received: int = 0
    sums: int = 0

    def __or__(self, other: Extent) -> Extent:
        """Enough for either."""
        received, sums = max(self.received, other.received), max(self.sums, other.sums)
        return Extent(max(self.buffer, other.buffer), received, sums)


class Storage:
    """All memory of a communicator, or of several of which one works at a time."""

    def __init__(self, extent: Extent, dtype: torch.dtype) -> None:
        self.buffer = RegisteredMemory(extent.buffer, dtype)
        self.received = RegisteredMemory(extent.received, dtype) if extent.received else None
        self._sums = RegisteredMemory(extent.sums, torch.float32) if extent.sums else None

    def received_region(self, offset: int, shape: tuple[int, ...]) -> Region:
        """Where a part of a sum is received."""
        assert self.received is not None, "the extent of a reduce-scatter has room to receive in"
        return self.received.region(offset, shape)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """``out`` = the sum of ``parts`` in their order, in float32, rounded once."""
        assert self._sums is not None, "the extent of a reduce-scatter has room for sums"
        total = self._sums.view(0, tuple(parts[0].shape))
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)

    def poison(self, value: float) -> None:
        for memory in (self.buffer, self.received, self._sums):
            if memory is not None:
                memory.flat.fill_(value)


class Communicator:
    """One registered buffer at capacity ``[T_cap, H]``, of which the prefix of the active shape is used.

    ``spec``: what was registered, and its settings now. ``set_tokens`` changes the active shape; everything else
    follows from the chunk layout of that T. ``storage``: memory that it shares with others of which one works at a
    time; without one it makes its own. Subclasses add the collective itself.
    """

    def __init__(self, spec: CommSpec, engine: Engine, storage: Storage | None = None) -> None:
        self.spec, self.name, self._engine = spec, spec.name, engine
        self.rank, self.tp = engine.rank, spec.tp
        self.tokens, self.hidden = spec.capacity
        self._layout: ChunkLayout | None = None
        self._storage = Storage(self.needs(spec), spec.dtype) if storage is None else storage
        self._memory = self._storage.buffer

    @classmethod
    def needs(cls, spec: CommSpec) -> Extent:
        """The memory of a communicator of ``spec``."""
        return Extent(registered_rows(spec.method, spec.collective, spec.capacity[0], spec.tp) * spec.capacity[1])

    def configure(self, spec: CommSpec) -> None:
        """Take the settings of ``spec``: another ``num_splits`` or ``aggregate`` of the same method, in place."""
        self.spec = spec
        self._layout = None

    def set_tokens(self, tokens: int) -> None:
        """Make ``[tokens, H]`` the active shape; the layout is computed when it is needed."""
        self.tokens = tokens
        self._layout = None

    @property
    def layout(self) -> ChunkLayout:
        """The chunk layout of the active shape."""
        if self._layout is None:
            self._layout = self.spec.layout(self.tokens)
        return self._layout

    @property
    def local_rows(self) -> int:
        """T/tp, the rows that one rank owns."""
        return self.tokens // self.tp

    def is_p2p_overlap(self) -> bool:
        """Whether chunks travel in a ring, as TE's method of that name says."""
        return self.spec.method == "ring_exchange"

    def copy_into_buffer(self, data: torch.Tensor, local_chunk: bool = False) -> None:
        """Copy ``data`` into the whole buffer (T*H elements), or into this rank's chunk (T/tp*H elements).

        Only the number of elements and the dtype matter, as in TE. Raises :class:`UBShapeError` for others,
        before anything is copied.
        """
        self._engine.check_thread(self.name)
        target = self.get_buffer(local_chunk)
        if data.numel() != target.numel() or data.dtype != target.dtype:
            where = "local chunk" if local_chunk else "buffer"
            raise UBShapeError(
                f"{self.name}: a tensor of {data.numel()} elements of {data.dtype} does not fit the {where} "
                f"of {target.numel()} elements of {target.dtype} (active [{self.tokens}, {self.hidden}])"
            )
        target.copy_(data.reshape(target.shape))
        self._engine.filled.add(self.name)

    def get_buffer(self, local_chunk: bool = False, shape: Iterable[int] | None = None) -> torch.Tensor:
        """A view of the active buffer, or of this rank's chunk; it is valid until the shape changes.

        ``shape``: another shape of as many elements; :class:`UBShapeError` if they are not as many.
        """
        view = self._local() if local_chunk else self._memory.view(0, self.layout.view_shape)
        if shape is None:
            return view
        wanted = tuple(shape)
        if torch.Size(wanted).numel() != view.numel():
            raise UBShapeError(
                f"{self.name}: shape {list(wanted)} does not have the {view.numel()} elements of the active "
                f"{'local chunk' if local_chunk else 'buffer'} {list(view.shape)}"
            )
        return view.view(wanted)

    def poison(self, value: float = float("nan")) -> None:
        """Fill all registered memory, staging included, so that a read of what was not written shows (for tests)."""
        self._storage.poison(value)

    def _local(self) -> torch.Tensor:
        return self._chunk(self.rank).tensor

    def _chunk(self, index: int) -> Region:
        chunk = self.layout.chunks[index]
        return self._memory.region(chunk.offset, (chunk.rows, chunk.columns))

    def _rows(self, index: int) -> slice:
        """The rows of the microbatch that rank ``index`` owns."""
        return slice(index * self.local_rows, (index + 1) * self.local_rows)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.tp) if rank != self.rank]


@contextmanager
def gemm_span(name: str) -> Iterator[None]:
    """Record the body as a GEMM, if a trace is being made."""
    tracer = trace.active()
    if tracer is None:
        yield
        return
    begin = trace.now()
    try:
        yield
    finally:
        tracer.add(trace.GEMM, name, begin)


def check_output(name: str, out: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """:class:`UBShapeError` unless ``out`` is what the reduce-scatter of the active shape produces."""
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise UBShapeError(
            f"{name}: the output of the active shape is {list(shape)} of {dtype}, got {list(out.shape)} of {out.dtype}"
        )

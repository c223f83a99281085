# SPDX-License-Identifier: Apache-2.0
"""Sees every operand on its way to a communicator, before anything is copied or enqueued.

TE reads the buffer's shape, not the operand's, when it enqueues a reduce-scatter: too small an active shape makes
it write past the chunk, without an error. So each way in is wrapped: ``tex.generic_gemm``, which all of TE's modules
and fused operations call by attribute, and the communicators' ``copy_into_buffer`` and ``get_buffer``. The same
places tell when the shape must not change (:meth:`Guard.busy`) and, in auto mode, what it has to be.

A step makes a dozen such calls, and where the host is the limit, each costs. So native code passes on what agrees with
the active shape (``csrc/gate.h``), and the wrappers here see the rest.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import UBShapeError, UBUnsupportedError
from ...rules import check_spec, check_tokens
from ...shapes import CommSpec, Shape
from ..protocol import OnOperand
from . import hazards
from .captures import Captures
from .communicators import Communicator
from .patches import Patches

logger = logging.getLogger("ub_dynamic")
_COMM, _COMM_TYPE, _EXTRA, _BULK = 16, 17, 18, 19  # positions in generic_gemm; TE passes them by keyword
_KINDS = {
    (False, False): "all-gather + GEMM",
    (False, True): "GEMM + reduce-scatter",
    (True, False): "bulk all-gather",
    (True, True): "bulk reduce-scatter",
}


_CAPTURING = "a CUDA graph is being captured: set the shape before the capture, one graph per shape"


@dataclass(frozen=True, eq=False)
class _Entry:
    name: str
    tokens: int  # capacity
    hidden: int
    tp: int
    spec: CommSpec | None
    reason: str | None  # why it works at capacity only
    ring_rs: bool  # its buffer is no [T, H]
    bulk_rs: bool


class Guard:
    """The wrappers around one set of communicators; :meth:`install` and :meth:`remove` may alternate.

    ``make_gate(lent, enqueuing, gather, scatter)`` returns the native fast path; communicators are in its registry in
    the order of ``communicators`` that have a spec.
    """

    def __init__(
        self,
        communicators: Sequence[Communicator],
        capacity: Shape,
        *,
        nvtx: bool = False,
        methods: hazards.Methods = dict,
        make_gate: Callable[..., Any] | None = None,
    ) -> None:
        self._runs: Counter[tuple[str, str]] = Counter()  # beside those that the native path has counted since install
        self._communicators = tuple(communicators)
        self._capacity = capacity
        self._nvtx = nvtx
        self._methods = methods
        self._make_gate = None if nvtx else make_gate
        self._gate: Any = None
        self._patches = Patches()
        self._captures = Captures()
        self._on_operand: OnOperand = lambda name, tokens: None
        self._entries: dict[int, _Entry] = {}
        self._lent: dict[str, weakref.ref[torch.Tensor]] = {}  # handed out or filled, and no GEMM used it yet
        self._enqueuing: dict[int, str] = {}  # thread -> communicator

    def install(self, on_operand: OnOperand) -> None:
        """Report operands to ``on_operand`` from now on; :class:`UBUnsupportedError` if TE lacks a way in."""
        import transformer_engine_torch as tex

        self._on_operand = on_operand
        self._entries = {id(comm.reference()): self._entry(comm) for comm in self._communicators}
        self._ag, self._rs = tex.CommOverlapType.AG, tex.CommOverlapType.RS
        self._gate = self._new_gate()
        try:
            hazards.refuse(self._patches, self._communicators, self._methods)
            self._captures.watch(self._patches)
            self._replace(tex, "generic_gemm", self._wrap_gemm)
            for kind in (tex.CommOverlap, tex.CommOverlapP2P):
                self._replace(kind, "copy_into_buffer", self._wrap_copy)
                self._replace(kind, "get_buffer", self._wrap_get_buffer)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the wrappers back."""
        for name in self._patches.undo():
            logger.warning("%s was replaced by somebody else and keeps our wrapper inside", name)
        self._captures.stop()
        self._entries.clear()  # a wrapper that stays behind finds nothing to check
        self._runs = self.runs
        if self._gate is not None:
            self._gate.clear()
        self._lent.clear()

    @property
    def runs(self) -> Counter[tuple[str, str]]:
        """How many overlaps were enqueued so far, by ``(communicator, kind)``; one that is under way while the guard is
        put in anew is left out.
        """
        return self._runs + Counter({} if self._gate is None else self._gate.runs())

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        def make(original: Any) -> Any:
            wrapper = wrap(original)
            return wrapper if self._gate is None else getattr(self._gate, name)(original, wrapper)

        self._patches.replace(owner, name, make)

    def _new_gate(self) -> Any:
        if self._make_gate is None:
            return None
        gate = self._make_gate(self._lent, self._enqueuing, self._ag, self._rs)
        dynamic = [comm for comm in self._communicators if comm.spec is not None]
        for index, comm in enumerate(dynamic):
            spec, buffer = comm.spec, comm.reference()
            if spec is None or buffer is None or spec.dtype.itemsize == 1:
                continue  # quantised operands have no plain shape, so they take the long way
            entry = self._entries[id(buffer)]
            gate.add(
                buffer,
                entry.name,
                index,
                entry.hidden,
                entry.tp,
                splits=spec.method != "bulk",
                copies=not entry.ring_rs,
                lends=entry.bulk_rs,
                kinds=[(entry.name, _KINDS[bulk, scatters]) for bulk in (False, True) for scatters in (False, True)],
            )
        return gate

    def under_way(self) -> tuple[dict[str, Any], dict[int, str], dict[str, int], Callable[[], bool] | None]:
        """What :meth:`busy` looks at, for native code: three dictionaries that are empty while nothing is under way,
        and TE's function that says whether it captures a graph.
        """
        return self._lent, self._enqueuing, self._captures.under_way, self._captures.te

    def busy(self) -> str | None:
        """Why the shape must not change right now, or None."""
        if not (self._enqueuing or self._lent):
            return _CAPTURING if self._captures.active() else None
        own = threading.get_ident()
        for thread, name in tuple(self._enqueuing.items()):
            if thread != own:
                return f"thread {thread} is enqueuing the overlap of {name}"
        for name, view in tuple(self._lent.items()):
            if view() is not None:
                return f"the buffer of {name} is filled and its GEMM was not called yet"
            self._lent.pop(name, None)  # whoever asked for it has given up, by an exception say
        return _CAPTURING if self._captures.active() else None

    def give_up(self) -> None:
        """Whoever filled a buffer and was to call its GEMM was ended by an exception, which may keep the view alive."""
        self._lent.clear()

    # -- the ways in -----------------------------------------------------------------------------------------

    def _wrap_gemm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        entries, lent, enqueuing = self._entries, self._lent, self._enqueuing
        ag, rs = self._ag, self._rs
        enqueue = _with_nvtx(original) if self._nvtx else None

        @functools.wraps(original)
        def generic_gemm(*args: Any, **kwargs: Any) -> Any:
            comm = kwargs.get("comm_overlap") if len(args) <= _COMM else args[_COMM]
            entry = None if comm is None else entries.get(id(comm))
            if entry is None:
                if lent and comm is None and len(args) > 4 and args[4] is not None:
                    args = self._match_output(args)
                return original(*args, **kwargs)
            comm_type = kwargs.get("comm_type") if len(args) <= _COMM_TYPE else args[_COMM_TYPE]
            bulk = bool(kwargs.get("bulk_overlap", False) if len(args) <= _BULK else args[_BULK])
            scatters = comm_type is rs or (comm_type is not ag and comm_type == rs)
            self._check_gemm(entry, args, kwargs, scatters and not bulk)
            lent.pop(entry.name, None)
            thread = threading.get_ident()
            enqueuing[thread] = entry.name
            try:
                result = enqueue(entry.name, args, kwargs) if enqueue else original(*args, **kwargs)
            finally:
                del enqueuing[thread]
            self._runs[entry.name, _KINDS[bulk, scatters]] += 1
            return result

        return generic_gemm

    def _check_gemm(self, entry: _Entry, args: tuple[Any, ...], kwargs: Any, splits: bool) -> None:
        a = args[0] if args else kwargs["A"]
        b = args[2] if len(args) > 2 else kwargs["B"]
        tokens = _rows(b)
        spec = entry.spec
        fp8 = spec is not None and spec.dtype.itemsize == 1
        if fp8 and tokens != entry.tokens and any(type(x).__name__.startswith("MXFP8") for x in (a, b)):
            raise UBUnsupportedError(
                f"{entry.name}: MXFP8 overlap works at the capacity of {entry.tokens} tokens only, got "
                f"{tokens}: its scales are tiled for a fixed shape. Delayed and current scaling take any valid T"
            )
        self._operand(entry, tokens)
        if splits and spec is not None:
            transa = args[1] if len(args) > 1 else kwargs["transA"]
            extra = kwargs.get("extra_output") if len(args) <= _EXTRA else args[_EXTRA]
            _check_scatter(entry, spec, a.size()[0 if transa else -1], tokens, extra)

    def _match_output(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a plain GEMM whose output is a buffer that was handed out before T was known.

        TE asks for the buffer of a bulk wgrad reduce-scatter without naming a shape. If nothing reached a
        communicator before in this backward, the shape is still the one of an earlier microbatch.
        """
        out = args[4]
        comm = next((comm for comm in self._communicators if self._is_lent(comm.name, out)), None)
        tokens = _rows(args[2])
        if comm is None or tokens == _rows(out):
            return args
        buffer = comm.reference()
        assert buffer is not None
        entry = self._entries[id(buffer)]
        del self._lent[comm.name]
        self._operand(entry, tokens)  # raises, or sets T in auto mode
        return *args[:4], buffer.get_buffer(shape=[tokens, entry.hidden]), *args[5:]

    def _is_lent(self, name: str, tensor: Any) -> bool:
        reference = self._lent.get(name)
        return reference is not None and reference() is tensor

    def _wrap_copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        entries = self._entries

        @functools.wraps(original)
        def copy_into_buffer(comm: Any, input: torch.Tensor, local_chunk: bool = False) -> Any:
            entry = entries.get(id(comm))
            if entry is not None and not entry.ring_rs:
                self._operand(entry, _tokens(entry, input.numel(), local_chunk))
            return original(comm, input, local_chunk)

        return copy_into_buffer

    def _wrap_get_buffer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        entries, lent = self._entries, self._lent

        @functools.wraps(original)
        def get_buffer(comm: Any, local_chunk: bool = False, shape: Any = None) -> Any:
            entry = entries.get(id(comm))
            if entry is None or entry.ring_rs:
                return original(comm, local_chunk, shape)
            if shape is not None:
                self._operand(entry, _tokens(entry, math.prod(shape), local_chunk))
            view = original(comm, local_chunk, shape)
            if not local_chunk and (shape is not None or entry.bulk_rs):
                lent[entry.name] = weakref.ref(view)
            return view

        return get_buffer

    def _operand(self, entry: _Entry, tokens: int) -> None:
        if entry.spec is not None:
            self._on_operand(entry.name, tokens)
        elif entry.reason is not None and tokens != entry.tokens:
            raise UBShapeError(
                f"{entry.name}: the microbatch has {tokens} tokens, but this communicator stays at the capacity of "
                f"{entry.tokens} tokens: {entry.reason}"
            )

    def _entry(self, comm: Communicator) -> _Entry:
        use = (comm.spec.method, comm.spec.collective) if comm.spec else None
        return _Entry(
            comm.name,
            *self._capacity,
            comm.tp,
            comm.spec,
            comm.skipped if comm.fixed else None,
            ring_rs=use == ("ring_exchange", "rs"),
            bulk_rs=use == ("bulk", "rs"),
        )


def _check_scatter(entry: _Entry, spec: CommSpec, columns: int, tokens: int, extra: Any) -> None:
    """What a split GEMM + reduce-scatter needs beyond the right T."""
    if columns != entry.hidden:
        raise UBShapeError(
            f"{entry.name}: the GEMM has {columns} output features, but its buffer was registered with "
            f"H = {entry.hidden}"
        )
    if extra is not None and extra.numel() * entry.tp != tokens * columns:
        raise UBShapeError(
            f"{entry.name}: the reduce-scattered output {list(extra.shape)} is not {tokens} / {entry.tp} rows of "
            f"{columns}: dim 0 of the layer's input must be a multiple of tp = {entry.tp}"
        )
    if spec.method == "bulk":
        hazards.refuse_pipelined(entry.name, quantised=spec.dtype.itemsize == 1)
        _check_split_use(spec, tokens)


@functools.lru_cache(maxsize=1024)
def _check_split_use(spec: CommSpec, tokens: int) -> None:
    # TE's fused linear takes the bulk dgrad communicator for a pipelined reduce-scatter if the weight is frozen.
    pipeline = replace(spec, name=f"{spec.name} as a pipeline", method="pipeline", collective="rs")
    check_spec(pipeline)
    check_tokens(pipeline, tokens)


def _tokens(entry: _Entry, numel: int, local_chunk: bool) -> int:
    tokens, rest = divmod(numel * entry.tp if local_chunk else numel, entry.hidden)
    if rest:
        raise UBShapeError(f"{entry.name}: {numel} elements are no whole rows of H = {entry.hidden}")
    return tokens


def _rows(operand: Any) -> int:
    """Rows of a tensor or quantised tensor: all dimensions but the last, together."""
    shape = operand.size()
    return shape[0] if len(shape) == 2 else math.prod(shape[:-1])


def _with_nvtx(original: Callable[..., Any]) -> Callable[..., Any]:
    def enqueue(name: str, args: Any, kwargs: Any) -> Any:
        with torch.cuda.nvtx.range(f"ub_dynamic.overlap {name}"):
            return original(*args, **kwargs)

    return enqueue

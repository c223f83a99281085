# SPDX-License-Identifier: Apache-2.0
"""The host backend: TE's communicators on CPU, one process a rank, over MPI or gloo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...board import RankBoard
from ...errors import UBShapeError, UBStateError, UBUnsupportedError
from ...groups import Group
from ...overlap import OverlapConfig
from ...shapes import Collective, CommSpec, Method, Shape
from ..names import resolve_specs
from ..protocol import Alternatives, OnOperand
from .bulk import BulkAllGather, BulkReduceScatter
from .communicator import Communicator
from .engine import Engine
from .faults import abort_on_error
from .pipeline import PipelineReduceScatter
from .ring import RingAllGather, RingReduceScatter

DTYPES = (torch.float32, torch.bfloat16)
_CLASSES: Mapping[tuple[Method, Collective], type[Communicator]] = {
    ("bulk", "ag"): BulkAllGather,
    ("bulk", "rs"): BulkReduceScatter,
    ("pipeline", "rs"): PipelineReduceScatter,
    ("ring_exchange", "ag"): RingAllGather,
    ("ring_exchange", "rs"): RingReduceScatter,
}
_EXTERNAL = "an external all-gather serves MXFP8 only, so the host backend makes no buffer for it"


class HostBackend:
    """Communicators of one process, made at capacity; see :class:`~ub_dynamic.backends.protocol.Backend`.

    ``specs``: what to make, the same on every rank; those of method ``external`` are skipped. ``group``: the
    TP group; with a single rank there is nothing to communicate, and no communicator is made. ``board``: a
    waiting rank looks at it too, for ranks that changed to another T. ``timeout_s``: how long a rank waits
    for another one (default: ``UB_DYNAMIC_TIMEOUT``, or 20). Collective."""

    name = "host"

    def __init__(
        self,
        specs: Iterable[CommSpec],
        group: Group,
        board: RankBoard | None = None,
        timeout_s: float | None = None,
        alternatives: Alternatives | None = None,
    ) -> None:
        every = {spec.name: spec for spec in specs} if group.size > 1 else {}
        self.specs: Mapping[str, CommSpec] = {name: spec for name, spec in every.items() if spec.method != "external"}
        self.skipped: Mapping[str, str] = {name: _EXTERNAL for name, spec in every.items() if spec.method == "external"}
        for spec in self.specs.values():
            _check(spec, group)
        self.notes: Mapping[str, str] = {}
        self.group, self.tp = group, group.size
        self.engine = Engine(group, tuple(self.specs), board, timeout_s) if group.size > 1 else None
        self._communicators: dict[str, Communicator] = {}
        if self.engine is not None:
            try:
                for name, spec in self.specs.items():
                    self._communicators[name] = _CLASSES[spec.method, spec.collective](spec, self.engine)
            except BaseException as error:  # no memory; the other ranks are told, and wait for nothing
                self.engine.fail(error)
                self.engine.close()
                raise
        self._all = tuple(self._communicators.values())
        self._on_operand: OnOperand | None = None
        self._destroyed = False
        self._abort = abort_on_error(group, self._failed)

    # -- what the manager uses -------------------------------------------------------------------------------

    def apply(self, tokens: int) -> None:
        for communicator in self._all:
            communicator.set_tokens(tokens)

    def apply_one(self, name: str, tokens: int) -> None:
        self._communicators[name].set_tokens(tokens)

    def plan(self, choices: Mapping[str, OverlapConfig]) -> Any:
        if choices:
            raise UBUnsupportedError("the host backend cannot choose by T yet: leave policy out")

    def switch(self, plan: Any) -> None:
        return

    def busy(self) -> str | None:
        return None if self.engine is None else self.engine.busy()

    def find(self, communicator: object) -> str | None:
        return next((name for name, mine in self._communicators.items() if mine is communicator), None)

    def connect(self, on_operand: OnOperand | None) -> None:
        self._on_operand = on_operand

    def destroy(self) -> None:
        global _current
        if self._destroyed:
            return
        self._destroyed = True
        if _current is self:
            _current = None
        try:
            if self.engine is not None:
                self.engine.close()
        finally:
            if self._abort is not None and not self._failed():
                self._abort.uninstall()

    # -- what the layers use ---------------------------------------------------------------------------------

    def communicator(self, name: str) -> Communicator:
        """The communicator of TE's ``name``; :class:`UBStateError` if there is none."""
        if self._destroyed:
            raise UBStateError("the communicators are destroyed; call initialize_ub first")
        try:
            return self._communicators[name]
        except KeyError:
            reason = self.skipped.get(name, f"known are {', '.join(self._communicators)}")
            raise UBStateError(f"no communicator {name!r}: {reason}") from None

    def operand(self, name: str, tokens: int) -> Communicator:
        """The communicator of ``name``, for an operand of ``tokens`` tokens, which it must be ready to take.

        Reports the operand first (:meth:`connect`); then :class:`UBShapeError` unless the active shape has as
        many tokens. Nothing is copied or sent before.
        """
        communicator = self.communicator(name)
        if self._on_operand is not None:
            self._on_operand(name, tokens)
        if tokens != communicator.tokens:
            raise UBShapeError(
                f"{name}: the operand has {tokens} tokens, the active shape is {communicator.tokens} tokens; "
                f"call set_ub_active_shape([{tokens}, {communicator.hidden}]) first"
            )
        return communicator

    def _failed(self) -> bool:
        return self.engine is not None and self.engine.failure is not None


_current: HostBackend | None = None


def create_host_backend(
    shape: Shape,
    tp: int,
    dtype: torch.dtype,
    ub_cfgs: Mapping[str, Mapping[str, Any]] | None,
    group: Group,
    board: RankBoard | None = None,
    timeout_s: float | None = None,
    alternatives: Alternatives | None = None,
) -> HostBackend:
    """The process-wide backend with TE's communicators at capacity ``shape`` = ``(T_cap, H)``. Collective.

    Raises :class:`UBStateError` if there is one already, :class:`UBUnsupportedError` for a dtype other than
    float32 and bfloat16, and what :func:`~ub_dynamic.backends.names.resolve_specs` refuses.
    """
    global _current
    if _current is not None:
        raise UBStateError("the host communicators exist already; call destroy_ub first")
    if dtype not in DTYPES:
        raise UBUnsupportedError(f"the host backend takes float32 and bfloat16, not {dtype}")
    specs = resolve_specs(shape, tp, dtype, ub_cfgs) if tp > 1 else ()
    _current = HostBackend(specs, group, board, timeout_s, alternatives)
    return _current


def current_backend() -> HostBackend:
    """The process-wide backend; :class:`UBStateError` before ``initialize_ub`` and after ``destroy_ub``."""
    if _current is None:
        raise UBStateError("the host communicators are not initialised: call initialize_ub first")
    return _current


def get_ub(name: str, use_fp8: bool = False) -> Communicator:
    """The process-wide communicator of that name, as TE's function of that name."""
    if use_fp8:
        raise UBUnsupportedError("the host backend has no FP8 communicators")
    return current_backend().communicator(name)


def _check(spec: CommSpec, group: Group) -> None:
    if spec.dtype not in DTYPES:
        raise UBUnsupportedError(f"{spec.name}: the host backend takes float32 and bfloat16, not {spec.dtype}")
    if spec.tp != group.size:
        raise UBShapeError(f"{spec.name} is for tp = {spec.tp}, but the TP group has {group.size} ranks")
    if (spec.method, spec.collective) not in _CLASSES:
        raise UBUnsupportedError(
            f"{spec.name}: no host communicator of method {spec.method} and collective {spec.collective}"
        )
    spec.layout(spec.capacity[0])  # a capacity that cannot be cut is refused here

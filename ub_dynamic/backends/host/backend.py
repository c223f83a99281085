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
from ...rules import TokenRule
from ...shapes import CommSpec, Shape
from ..names import resolve_specs
from ..protocol import Alternatives, OnOperand
from .alternatives import CLASSES, NOTES, NOTES_OF_ONE_RANK, HostAlternatives, Plan
from .communicator import Communicator
from .engine import Engine
from .faults import abort_on_error

DTYPES = (torch.float32, torch.bfloat16)
_EXTERNAL = "an external all-gather serves MXFP8 only, so the host backend makes no buffer for it"


class HostBackend:
    """Communicators of one process, made at capacity; see :class:`~ub_dynamic.backends.protocol.Backend`.

    ``specs``: what to make, the same on every rank; those of method ``external`` are skipped. ``group``: the
    TP group; with a single rank there is nothing to communicate, and no communicator is made. ``board``: a
    waiting rank looks at it too, for ranks that changed to another T. ``timeout_s``: how long a rank waits
    for another one (default: ``UB_DYNAMIC_TIMEOUT``, or 20). ``alternatives``: what a policy may ask for; those of
    one GEMM share one storage, and another method than the configured one has a communicator of its own in it.
    Collective."""

    name = "host"
    capacity_only: str | None = None
    auto_excludes_policy: str | None = None

    def __init__(
        self,
        specs: Iterable[CommSpec],
        group: Group,
        board: RankBoard | None = None,
        timeout_s: float | None = None,
        alternatives: Alternatives | None = None,
    ) -> None:
        every = {spec.name: spec for spec in specs} if group.size > 1 else {}
        self._alternatives = HostAlternatives(every, alternatives or {}) if every else HostAlternatives({}, {})
        made = self._alternatives.registered
        self.specs: Mapping[str, CommSpec] = {name: spec for name, spec in made.items() if spec.method != "external"}
        self.skipped: Mapping[str, str] = {name: _EXTERNAL for name, spec in made.items() if spec.method == "external"}
        self.notes: Mapping[str, str] = NOTES if group.size > 1 else {**NOTES, **NOTES_OF_ONE_RANK}
        for spec in self.specs.values():
            _check(spec, group)
        self.group, self.tp = group, group.size
        self.engine = Engine(group, tuple(self.specs), board, timeout_s) if group.size > 1 else None
        self.communicators: Mapping[str, Communicator] = {}  # every one that was made, by its name in ``specs``
        if self.engine is not None:
            try:
                self.communicators = self._alternatives.make(self.engine)
            except BaseException as error:  # no memory; the other ranks are told, and wait for nothing
                self.engine.fail(error)
                self.engine.close()
                raise
        self._all = tuple(self.communicators.values())
        self._standing: Mapping[str, Communicator | None] = {}  # by TE's name; None: a plain collective
        self.switch(self.plan({}))
        self._on_operand: OnOperand | None = None
        self._destroyed = False
        self._abort = abort_on_error(group, self._failed)

    # -- what the manager uses -------------------------------------------------------------------------------

    def apply(self, tokens: int) -> None:
        for communicator in self._all:
            communicator.set_tokens(tokens)

    def apply_one(self, name: str, tokens: int) -> None:
        self.communicators[name].set_tokens(tokens)

    def plan(self, choices: Mapping[str, OverlapConfig]) -> Plan:
        return self._alternatives.plan(choices, self.communicators)

    def switch(self, plan: Plan) -> None:
        self._standing = plan.standing
        for communicator, spec in plan.settings:
            communicator.configure(spec)

    def follow_choices(self, follow: bool) -> None:
        """Layers always ask for what stands (:meth:`take`)."""

    def busy(self) -> str | None:
        return None if self.engine is None else self.engine.busy()

    def give_up(self) -> None:
        if self.engine is not None:
            self.engine.filled.clear()

    def make_ready(self, rule: TokenRule, board: RankBoard | None) -> None:
        return None

    def find(self, communicator: object) -> str | None:
        return next((name for name, mine in self.communicators.items() if mine is communicator), None)

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
        """The communicator that stands under TE's ``name`` now; :class:`UBStateError` if there is none."""
        return _overlapped(name, self._stands(name))

    def operand(self, name: str, tokens: int) -> Communicator:
        """The same, ready for an operand of ``tokens`` tokens: see :meth:`take`."""
        return _overlapped(name, self.take(name, tokens))

    def take(self, name: str, tokens: int) -> Communicator | None:
        """The communicator that stands under ``name`` for an operand of ``tokens`` tokens; None: a plain collective.

        Reports the operand first (:meth:`connect`), which may set T and with it what stands there; then
        :class:`UBShapeError` unless the active shape has as many tokens. Nothing is copied or sent before.
        """
        self._stands(name)
        if self._on_operand is not None:
            self._on_operand(name, tokens)
        communicator = self._stands(name)
        if communicator is not None and tokens != communicator.tokens:
            raise UBShapeError(
                f"{name}: the operand has {tokens} tokens, the active shape is {communicator.tokens} tokens; "
                f"call set_ub_active_shape([{tokens}, {communicator.hidden}]) first; if this is a backward, bind it to "
                "its T with microbatch(...) and bind_backward"
            )
        return communicator

    def _stands(self, name: str) -> Communicator | None:
        if self._destroyed:
            raise UBStateError("the communicators are destroyed; call initialize_ub first")
        try:
            return self._standing[name]
        except KeyError:
            reason = self.skipped.get(name, f"known are {', '.join(self._standing)}")
            raise UBStateError(f"no communicator {name!r}: {reason}") from None

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


def _overlapped(name: str, communicator: Communicator | None) -> Communicator:
    if communicator is None:
        raise UBStateError(f"{name} is not overlapped at this T: the policy chose a plain collective")
    return communicator


def _check(spec: CommSpec, group: Group) -> None:
    if spec.dtype not in DTYPES:
        raise UBUnsupportedError(f"{spec.name}: the host backend takes float32 and bfloat16, not {spec.dtype}")
    if spec.tp != group.size:
        raise UBShapeError(f"{spec.name} is for tp = {spec.tp}, but the TP group has {group.size} ranks")
    if (spec.method, spec.collective) not in CLASSES:
        raise UBUnsupportedError(
            f"{spec.name}: no host communicator of method {spec.method} and collective {spec.collective}"
        )
    spec.layout(spec.capacity[0])  # a capacity that cannot be cut is refused here

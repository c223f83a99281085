# SPDX-License-Identifier: Apache-2.0
"""The TE backend: the communicators of one ``initialize_ub``, held weakly and given an active shape natively."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from ...board import RankBoard
from ...errors import UBUnsupportedError
from ...groups import Group
from ...overlap import OverlapConfig
from ...rules import TokenRule
from ...shapes import CommSpec, Shape
from ..names import AUTO_EXCLUDES_POLICY
from ..protocol import OnOperand
from .communicators import Communicator
from .guard import Guard
from .plans import Plan, Plans
from .shutdown import Bootstrap, destroy_communicators


class TEBackend:
    """What :class:`~ub_dynamic.backends.protocol.Backend` asks for, over stock Transformer Engine.

    ``helper`` is the bootstrap object that the shared communicator calls for every later registration. It is kept
    alive here, so that communicators can be constructed with it after initialisation too.
    """

    name = "te"
    auto_excludes_policy: str | None = AUTO_EXCLUDES_POLICY

    def __init__(
        self,
        communicators: tuple[Communicator, ...],
        capacity: Shape,
        group: Group,
        *,
        native: ModuleType | None,
        registry: Any,
        bootstrap: Bootstrap,
        plans: Plans | None = None,
    ) -> None:
        self.communicators = communicators
        self.capacity = capacity
        self.native = native
        self.specs: Mapping[str, CommSpec] = MappingProxyType(
            {comm.name: comm.spec for comm in communicators if comm.spec is not None}
        )
        self.skipped: Mapping[str, str] = MappingProxyType(
            {comm.name: comm.skipped for comm in communicators if comm.skipped is not None}
        )
        fixed = sorted({comm.skipped for comm in communicators if comm.fixed and comm.skipped is not None})
        self.capacity_only: str | None = None if self.specs else "; ".join(fixed) or None
        self.tp = group.size
        self.notes: Mapping[str, str] = plans.notes if plans else MappingProxyType({})
        self._plans = plans
        self._nvtx = os.environ.get("NVTE_NVTX_ENABLED", "0") == "1"  # TE's own switch
        self._group = group
        self._bootstrap = bootstrap
        self._registry = registry
        self._index = {name: index for index, name in enumerate(self.specs)}
        self._destroyed = False
        self.guard = Guard(
            communicators,
            capacity,
            nvtx=self._nvtx,
            methods=plans.methods if plans else dict,
            make_gate=None if native is None or registry is None else functools.partial(native.Gate, registry),
        )
        self.busy: Callable[[], str | None] = self.guard.busy  # asked at every change, so without a step in between
        self.apply: Callable[[int], None] = self._make_apply()
        self.switch: Callable[[Any], None] = plans.switch if plans else lambda plan: None

    def _make_apply(self) -> Callable[[int], None]:
        # The bound native function itself: nothing of Python stands between the manager and the rewrite.
        if not self.specs:
            return lambda tokens: None
        native: Callable[[int], None] = self._registry.apply
        if not self._nvtx:
            return native

        def apply(tokens: int) -> None:
            with torch.cuda.nvtx.range(f"ub_dynamic.set_active_shape T={tokens}"):
                native(tokens)

        return apply

    def apply_one(self, name: str, tokens: int) -> None:
        self._registry.apply_one(self._index[name], tokens)

    def plan(self, choices: Mapping[str, OverlapConfig]) -> Plan | None:
        if self._plans is not None:
            return self._plans.plan(choices)
        if choices:
            raise UBUnsupportedError(f"initialize_ub was given no alternatives, so nothing can be chosen: {choices}")
        return None

    def follow_choices(self, follow: bool) -> None:
        if self._plans is not None:
            self._plans.follow_choices(follow)

    def give_up(self) -> None:
        self.guard.give_up()

    def make_ready(self, rule: TokenRule, board: RankBoard | None) -> Callable[[int], bool | None] | None:
        if self.native is None or (board is not None and board.native is None):
            return None
        made = self.native.Ready(
            board.native if board else None, *self.guard.under_way(), rule.multiple, rule.minimum, rule.maximum
        )
        ready: Callable[[int], bool | None] = made.ask
        return ready

    def find(self, communicator: object) -> str | None:
        return next((comm.name for comm in self.communicators if comm.reference() is communicator), None)

    def connect(self, on_operand: OnOperand | None) -> None:
        self.guard.remove()
        if on_operand is not None:
            self.guard.install(on_operand)

    @property
    def helper(self) -> Any:
        """TE's bootstrap object, to construct further communicators with; the shared communicator calls it."""
        return self._bootstrap.helper

    def active_tokens(self, name: str) -> int:
        """T of one communicator as its object has it now (the capacity if it does not follow)."""
        if name not in self._index:
            return self.capacity[0]
        tokens: int = self._registry.active(self._index[name])
        return tokens

    def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        self.guard.remove()
        if self._plans is not None:
            self._plans.close()
        if self._registry is not None:
            self._registry.clear()
        references = {comm.name: comm.reference for comm in self.communicators}
        if _are_gone(references.values()):
            self._bootstrap.release(self._group)
        else:
            destroy_communicators(references, self._group, self.native, self._bootstrap)

    def doctor_report(self) -> dict[str, Any]:
        """One row a communicator: method, collective, dtype, active T, why it stays at capacity, overlaps run.

        The guard counts the overlaps; without it none are counted. ``stands_for``: the name under which TE's modules
        find it now; one of a policy that is not chosen stands under a name that no module asks for.
        """
        return {"capacity": list(self.capacity), "communicators": [self._row(comm) for comm in self.communicators]}

    def _row(self, comm: Communicator) -> dict[str, Any]:
        spec = comm.spec
        now = None
        if spec is not None and self.native is not None:
            now = self.native.settings(comm.reference())
        return {
            "name": comm.name,
            "dynamic": spec is not None,
            "reason": comm.skipped,
            "method": spec.method if spec else None,
            "collective": spec.collective if spec else None,
            "dtype": str(spec.dtype).removeprefix("torch.") if spec else None,
            "num_splits": now[0] if now else None,
            "num_sm": now[1] if now else None,
            "stands_for": self._plans.stands_for(comm) if self._plans else comm.name,
            "active_tokens": self.active_tokens(comm.name),
            "overlaps": {kind: count for (name, kind), count in self.guard.runs.items() if name == comm.name},
        }


def _are_gone(references: Iterable[weakref.ref[Any]]) -> bool:
    """Whether TE has other communicators by now: its own ``destroy_ub`` was called, from a reference that was taken
    before this package stood behind it, and then its ``initialize_ub``. Those are not this package's to destroy."""
    import transformer_engine.pytorch.module.base as base

    standing = (vars(base)["_ub_communicators"] or {}).values()
    mine = {id(comm) for reference in references if (comm := reference()) is not None}
    return bool(standing) and not any(id(comm) in mine for comm in standing)

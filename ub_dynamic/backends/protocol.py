# SPDX-License-Identifier: Apache-2.0
"""What the manager needs of a backend. A backend knows this file, never the manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..overlap import OverlapConfig
from ..rules import TokenRule
from ..shapes import CommSpec

Alternatives = Mapping[str, tuple[OverlapConfig, ...]]
"""Per GEMM (TE's communicator name), every configuration that some stage of a policy may ask for."""

OnOperand = Callable[[str, int], None]
"""Called with ``(communicator name, tokens of the operand)`` before anything is copied or enqueued.
It raises to refuse the operand."""


class Backend(Protocol):
    """The communicators of one process.

    ``specs``: those that follow the active shape, by name; alternatives of another method than the configured one
    are named ``"fc2_fprop (pipeline)"``. ``skipped``: the others, with the reason why they have no active shape.
    ``tp``: ranks of the TP group, which have to share T evenly whatever ``specs`` are. ``capacity_only``: why all of
    them work at the capacity alone, or None.
    ``notes``: what a policy cannot do here, by GEMM or setting. ``auto_excludes_policy``: why a policy and auto mode do
    not go together here, or None. The manager validates before it calls ``apply`` or ``apply_one``.
    """

    name: str
    specs: Mapping[str, CommSpec]
    skipped: Mapping[str, str]
    tp: int
    capacity_only: str | None
    notes: Mapping[str, str]
    auto_excludes_policy: str | None

    def apply(self, tokens: int) -> None:
        """Give every communicator of ``specs`` the active shape ``[tokens, H]``: host only, no device call."""

    def apply_one(self, name: str, tokens: int) -> None:
        """The same for one communicator."""

    def plan(self, choices: Mapping[str, OverlapConfig]) -> Any:
        """What :meth:`switch` needs to let each GEMM use its configuration, validated and computed once.

        Raises :class:`UBUnsupportedError` or :class:`UBShapeError` with the reason; nothing is changed.
        """

    def switch(self, plan: Any) -> None:
        """Let every GEMM of ``plan`` use its choice, and the others their configuration.

        Host only, no allocation. The active shape stays. UBStateError, with nothing changed, where somebody else has
        destroyed the communicators.
        """

    def follow_choices(self, follow: bool) -> None:
        """Whether layers ask, each time they run, what is chosen: while there is a policy. Off, they are as built.

        Raises :class:`UBUnsupportedError`, with nothing changed, for layers that cannot be made to ask.
        """

    def busy(self) -> str | None:
        """Why the shape must not change right now (capture, a filled buffer, an overlap being enqueued), or None."""

    def give_up(self) -> None:
        """An exception ended what was under way: no buffer that was filled waits for its overlap any more."""

    def make_ready(self, rule: TokenRule, board: Any) -> Callable[[int], bool | None] | None:
        """A function of T that publishes a change on ``board`` (a rank board, or None) and returns True if ``rule``
        accepts T, nothing is busy and the ranks agree so far. Else it returns False, and has done nothing; or None, if
        the change is published and the board has to be checked. None instead of a function: there is no faster way than
        to ask for these one by one.
        """

    def find(self, communicator: object) -> str | None:
        """The name of a communicator object of this backend, or None."""

    def connect(self, on_operand: OnOperand | None) -> None:
        """Report every operand that reaches a communicator to ``on_operand``; None ends that."""

    def destroy(self) -> None:
        """Release everything, on all ranks together; a second call does nothing."""

# SPDX-License-Identifier: Apache-2.0
"""Where a backend stands in a policy: a plan for each stage, made once, and the switch from one to the next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .backends.protocol import Backend
from .errors import UBStateError, UBUnsupportedError
from .overlap import OverlapConfig
from .policy import Choice, Choices, Policy

NOTHING_CHOSEN: Mapping[str, Choice] = MappingProxyType({})
_AS_CONFIGURED = Policy((1,), (NOTHING_CHOSEN,))


class Stages:
    """One policy on one backend; None: each GEMM as configured, at every T.

    Making it changes nothing, and raises :class:`UBUnsupportedError` or :class:`UBShapeError` for a policy that the
    backend cannot follow. ``choices``: those of the stage that stands, empty without a policy.
    """

    def __init__(self, backend: Backend, policy: Policy | None) -> None:
        if policy is not None and not isinstance(policy, Policy):
            raise UBUnsupportedError(
                f"{policy!r} is no Policy: TuningTable.policy() makes one, policy_of makes one of a callable, and None "
                "leaves each GEMM as configured"
            )
        self.policy = policy
        self.choices: Choices = NOTHING_CHOSEN
        self._backend = backend
        self._followed = policy or _AS_CONFIGURED
        self._starts = self._followed.starts
        self._plans = _plans(backend, self._followed)
        self._stage = 0
        self._plan: Any = None  # the one that the backend was last switched to

    def stand(self, tokens: int) -> None:
        """Let the backend stand at the stage of T, whatever it followed before.

        Raises :class:`UBUnsupportedError`, with nothing changed, where its layers cannot be made to ask for choices.
        """
        self._backend.follow_choices(self.policy is not None)
        self._plan = None
        self._go_to(self._followed.stage(tokens))

    def take_over(self, before: Stages, tokens: int) -> None:
        """:meth:`stand` instead of ``before``, which goes on where that fails; :class:`UBStateError` where somebody has
        taken the communicators apart.
        """
        try:
            self.stand(tokens)
        except UBUnsupportedError:  # a RuntimeError, too
            raise  # and nothing was changed
        except RuntimeError as error:
            self._backend.follow_choices(before.policy is not None)
            raise UBStateError(f"the policy cannot change: {error}") from error

    def follow(self, tokens: int) -> None:
        """Go on to the stage of T; the backend hears of it only where the plan differs. Host only, no allocation."""
        stage = bisect_right(self._starts, tokens, 1) - 1  # Policy.stage, a call less
        if stage != self._stage:
            self._go_to(stage)

    def _go_to(self, stage: int) -> None:
        plan = self._plans[stage]
        if plan is not self._plan:
            self._backend.switch(plan)
            self._plan = plan
        self._stage, self.choices = stage, self._followed.stages[stage]


def _plans(backend: Backend, policy: Policy) -> tuple[Any, ...]:
    """A plan for each stage, the same one where the configurations are the same."""
    plans: dict[frozenset[tuple[str, OverlapConfig]], Any] = {}
    found = []
    for stage in policy.stages:
        choices = {gemm: choice.config for gemm, choice in stage.items()}
        key = frozenset(choices.items())
        if key not in plans:
            plans[key] = backend.plan(choices)
        found.append(plans[key])
    return tuple(found)

# SPDX-License-Identifier: Apache-2.0
"""What the arms of a step differ in on one manager: the guard, auto mode, the policy; and what a policy's arm did."""

from __future__ import annotations

from typing import Any

from ..manager import Manager
from ..policy import Choices, Policy

GUARDED = ("dynamic", "policy", "auto")


def use_arm(manager: Manager, arm: str, policy: Policy | None) -> None:
    """Back to capacity, with the guard, auto mode and ``policy`` as ``arm`` has them; without the latter TE's layers
    are as they were built."""
    manager.backend.connect(None)
    manager.auto = False
    manager.reset_active_shape()
    manager.use_policy(policy if arm == "policy" else None)
    manager.auto = arm == "auto"
    if arm in GUARDED:
        manager.backend.connect(manager._on_operand)


def said(choices: Choices, layers: tuple[str, ...], otherwise: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of a row: the ``policy``'s choices for the GEMMs of these layers at its T, and what was done ``otherwise``."""
    chosen = [f"{gemm} {choice.config}" for gemm, choice in choices.items() if gemm.startswith(layers)]
    row = {"policy": ", ".join(chosen) or "as configured"}
    return {**row, "policy_otherwise": "; ".join(otherwise)} if otherwise else row

# SPDX-License-Identifier: Apache-2.0
"""What a training loop asks its TP group for, besides the overlapped layers."""

from __future__ import annotations

from typing import Any

from ub_dynamic.groups import Group, MPIGroup, TorchGroup


def transport(group: Group) -> str:
    """How the ranks talk, for people."""
    if isinstance(group, MPIGroup):
        return "MPI"
    return "gloo" if isinstance(group, TorchGroup) else "nothing (one rank)"


def handle(group: Group) -> Any:
    """What ``initialize_ub`` takes as ``tp_group``; None for a single process."""
    if isinstance(group, MPIGroup):
        return group.comm
    return group.process_group if isinstance(group, TorchGroup) else None


def total(group: Group, value: float, what: str) -> float:
    """The sum of ``value`` over the ranks, the same on each. Collective."""
    return float(sum(group.allgather(value, what)))

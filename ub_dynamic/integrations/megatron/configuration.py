# SPDX-License-Identifier: Apache-2.0
"""Which Megatron configurations cannot have a T of their own per microbatch, and why."""

from __future__ import annotations

from typing import Any

from ...errors import UBUnsupportedError

COMBINED = (
    "layers of one microbatch's forward and of another's backward are enqueued in turns on several streams, and one "
    "process has one active shape"
)
DELAYED = (
    "weight gradients are computed after the backward of their microbatch, when the active shape is that of another one"
)
GRAPHED = (
    "Megatron captures every layer once, at the T of its first microbatch, and a graph keeps that T; "
    "ub_dynamic.integrations.megatron.graph_decoder captures one graph a T"
)


def check_config(config: Any) -> None:
    """Raise :class:`UBUnsupportedError` with the reason if ``config`` has what a T per microbatch cannot go with.

    ``config``: Megatron's ``TransformerConfig`` or ``ModelParallelConfig``, or its parsed arguments. Settings that
    this version of Megatron does not have are taken as off; without ``tp_comm_overlap`` nothing is refused.
    """
    if not getattr(config, "tp_comm_overlap", False):
        return
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        refuse("overlap_moe_expert_parallel_comm", True, COMBINED)
    if getattr(config, "delay_wgrad_compute", False):
        refuse("delay_wgrad_compute", True, DELAYED)
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        if getattr(config, name, False):
            refuse(name, True, GRAPHED)
    graphs = getattr(config, "cuda_graph_impl", "none")
    if graphs not in (None, "none"):
        refuse("cuda_graph_impl", graphs, GRAPHED)


def refuse(name: str, value: object, reason: str) -> None:
    """Raise :class:`UBUnsupportedError` for one setting."""
    raise UBUnsupportedError(
        f"{name} = {value!r} cannot go with tp_comm_overlap and a T that changes: {reason}. Switch one of them off"
    )

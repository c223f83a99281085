# SPDX-License-Identifier: Apache-2.0
"""Which Megatron configurations cannot have a T of their own per microbatch, and why."""

from __future__ import annotations

import weakref
from typing import Any

import torch

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
    if getattr(config, "tp_comm_overlap", False):
        check_settings(config)


def check_settings(config: Any) -> None:
    """The same for a configuration whose layers overlap, whatever its ``tp_comm_overlap`` says."""
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


def overlaps(block: Any) -> bool:
    """Whether layers of ``block`` overlap.

    Building a layer for whose name TE has no buffers (``q_down_proj`` of multi-latent attention), Megatron switches
    ``tp_comm_overlap`` off in the configuration that all layers share; those that it built before overlap all the same.
    """
    if block.config.tp_comm_overlap:
        return True
    if block not in _built_to_overlap:
        _built_to_overlap[block] = any(
            name.startswith("ub_") and value is True for each in block.modules() for name, value in vars(each).items()
        )
    return _built_to_overlap[block]


_built_to_overlap: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def refuse(name: str, value: object, reason: str) -> None:
    """Raise :class:`UBUnsupportedError` for one setting."""
    raise UBUnsupportedError(
        f"{name} = {value!r} cannot go with tp_comm_overlap and a T that changes: {reason}. Switch one of them off"
    )

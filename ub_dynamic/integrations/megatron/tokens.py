# SPDX-License-Identifier: Apache-2.0
"""T of a microbatch, read from the tensor that enters one of Megatron's blocks of layers.

Megatron's activations are ``[S, B, H]`` with the rows of one tensor-parallel rank under sequence parallelism, so
``T = S * B * tp``: what the communicators see, under context parallelism the share of one CP rank. It is a host
value on every pipeline stage, since a stage that receives its input has received the shape before.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UBUnsupportedError
from ...shapes import Shape


def entering(block: Any, hidden_states: Any) -> torch.Tensor:
    """The tensor that ``block`` will work on.

    That is ``hidden_states``, possibly in Megatron's ``WrappedTensor``, or, on a pipeline stage that does not begin
    with the embedding, what ``set_input_tensor`` left. Raises :class:`UBUnsupportedError` where it is none of them.
    """
    if not getattr(block, "pre_process", True):
        hidden_states = block.input_tensor
    held = getattr(hidden_states, "_wrapper", None)  # looked at, not taken out: Megatron unwraps it once
    if isinstance(held, list) and held:
        hidden_states = held[0]
    if not isinstance(hidden_states, torch.Tensor) or hidden_states.dim() != 3:
        is_tensor = isinstance(hidden_states, torch.Tensor)
        found = f"shape {list(hidden_states.shape)}" if is_tensor else repr(hidden_states)
        raise UBUnsupportedError(
            f"{type(block).__name__} got {found} where Megatron has hidden states [S, B, H]: T cannot be read"
        )
    return hidden_states


def shape_of(hidden_states: torch.Tensor, config: Any) -> Shape:
    """``(T, H)`` of a microbatch whose activations are ``hidden_states`` ``[S, B, H]``."""
    sequence, batch, hidden = hidden_states.shape
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return sequence * batch * ranks, hidden

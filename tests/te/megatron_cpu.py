# SPDX-License-Identifier: Apache-2.0
"""megatron-core on the host: its own models, schedules and transfers between stages, without a GPU.

Megatron asks CUDA for the current device, for random states and for tensors; these questions are answered for the
host. Everything else is its own code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def on_host() -> Iterator[None]:
    """Inside, what Megatron does on the current CUDA device is done on the host."""
    import megatron.core.tensor_parallel.random as random

    host = {
        "current_device": lambda: "cpu",
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
    }
    with ExitStack() as stack:
        for name, function in host.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        for name in ("zeros", "empty", "tensor", "ones"):
            stack.enter_context(mock.patch.object(torch, name, _not_cuda(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
        stack.enter_context(mock.patch.object(random, "_get_cuda_rng_state", _get_state))
        stack.enter_context(mock.patch.object(random, "_set_cuda_rng_state", _set_state))
        yield


def _get_state(**_: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, **_: Any) -> None:
    torch.set_rng_state(state)


def _not_cuda(function: Any) -> Any:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return make


def config(**changes: Any) -> Any:
    """A small ``TransformerConfig`` whose layers are computed on the host."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "tp_comm_overlap": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": False,
    }
    return TransformerConfig(**{**settings, **changes})

# SPDX-License-Identifier: Apache-2.0
"""Two uses of overlap that Transformer Engine accepts, and that then read a buffer somebody else has overwritten.

- A frozen weight with ``ub_bulk_wgrad``: ``Linear`` and ``LayerNormLinear`` reduce-scatter dgrad inside the wgrad
  GEMM, which a frozen weight does not have. They return dgrad unreduced, as a view of the buffer.
- Delayed weight gradients whose stored operands are views of a buffer: the next layer overwrites them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import UBUnsupportedError
from .communicators import CUBLASMP, Communicator
from .patches import Patches

_STORAGES = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")


def refuse(patches: Patches, communicators: Sequence[Communicator]) -> None:
    """Wrap TE's modules so that both uses raise :class:`UBUnsupportedError` with the reason."""
    import transformer_engine.pytorch.module._common as common
    from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
    from transformer_engine.pytorch.module.linear import Linear

    for module in (Linear, LayerNormLinear):
        patches.replace(module, "forward", _refuse_frozen)
    if hasattr(common, "WeightGradStore"):
        regions = tuple(_region(comm.reference()) for comm in communicators if comm.skipped != CUBLASMP)
        patches.replace(common.WeightGradStore, "put", functools.partial(_refuse_delayed, regions=regions))


def _refuse_frozen(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, inp: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.ub_bulk_wgrad and inp.requires_grad and torch.is_grad_enabled() and _is_frozen(self):
            raise UBUnsupportedError(
                f"{type(self).__name__} {self.ub_name!r} has a frozen weight and ub_bulk_wgrad: TE would return "
                "dgrad without its reduce-scatter. Build the layer with ub_bulk_wgrad=False, ub_bulk_dgrad=False"
            )
        return original(self, inp, *args, **kwargs)

    return forward


def _is_frozen(module: Any) -> bool:
    return not any(getattr(module, name).requires_grad for name in module.weight_names)


def _refuse_delayed(original: Callable[..., Any], regions: Sequence[tuple[int, int]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def put(self: Any, tensor_list: Sequence[Any], func: Any) -> Any:
        for operand in tensor_list:
            if any(_is_inside(tensor, regions) for tensor in _tensors(operand)):
                raise UBUnsupportedError(
                    "delay_wgrad_compute stores an operand that is a view of a UserBuffers buffer, which the next "
                    "layer overwrites before the weight gradient is computed. Switch off delay_wgrad_compute, or "
                    "ub_overlap_ag (row-parallel) or ub_bulk_dgrad (column-parallel) of this layer"
                )
        return original(self, tensor_list, func)

    return put


def _region(communicator: Any) -> tuple[int, int]:
    """First address of a buffer, and the one past its end; the shape is at capacity."""
    buffer = communicator.get_buffer()
    return buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()


def _is_inside(tensor: torch.Tensor, regions: Sequence[tuple[int, int]]) -> bool:
    pointer = tensor.data_ptr()
    return any(first <= pointer < end for first, end in regions)


def _tensors(operand: Any) -> list[torch.Tensor]:
    parts = [getattr(operand, name, None) for name in _STORAGES]
    found = [part for part in parts if isinstance(part, torch.Tensor)]
    return found or ([operand] if isinstance(operand, torch.Tensor) else [])

# SPDX-License-Identifier: Apache-2.0
"""Four uses of overlap that Transformer Engine accepts, and that give wrong gradients without an error.

- A frozen weight with ``ub_bulk_wgrad``: ``Linear`` and ``LayerNormLinear`` reduce-scatter dgrad inside the wgrad
  GEMM, which a frozen weight does not have. They return dgrad unreduced, as a view of the buffer.
- A ``Linear`` that gathers in its dgrad GEMM (``ub_bulk_dgrad``, or ``ub_overlap_ag`` of a row-parallel one) and whose
  input needs no gradient: the GEMM is left out, and wgrad multiplies a buffer that was never gathered.
- Delayed weight gradients whose stored operands are views of a buffer: the next layer overwrites them.
- A dgrad GEMM with a pipelined reduce-scatter. ``CommOverlapBase::split_overlap_rs`` cuts the weight ``[k, m]`` of
  dgrad at multiples of ``m / num_splits * k`` elements, as if a chunk of columns were contiguous. That is true of a
  transposed weight alone, which FP8 has on GPUs that multiply FP8 in that layout only (before Blackwell).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import UBUnsupportedError
from ..names import DGRAD_REDUCE_SCATTER
from .communicators import CUBLASMP, Communicator
from .patches import Patches

_STORAGES = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")


Methods = Callable[[], Mapping[str, str]]


def refuse(patches: Patches, communicators: Sequence[Communicator], methods: Methods) -> None:
    """Wrap TE's modules so that these uses raise :class:`UBUnsupportedError` with the reason.

    ``methods`` tells what a policy has chosen for now, by GEMM; without one it is empty.
    """
    import transformer_engine.pytorch.module._common as common
    from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
    from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
    from transformer_engine.pytorch.module.linear import Linear
    from transformer_engine.pytorch.ops.fused.userbuffers_backward_linear import UserbuffersBackwardLinear

    configured = frozenset(comm.name for comm in communicators if _splits_by_rows(comm))

    def no_ring(name: str) -> bool:
        chosen = methods().get(name)
        return name in configured if chosen in (None, "none") else chosen != "ring_exchange"

    def ring_chosen(name: str) -> bool:
        return methods().get(name) == "ring_exchange"

    for module in (Linear, LayerNormLinear, LayerNormMLP):
        patches.replace(
            module, "forward", functools.partial(_refuse_modules, no_ring=no_ring, skips_dgrad=module is Linear)
        )
    patches.replace(
        UserbuffersBackwardLinear,
        "_functional_backward",
        functools.partial(_refuse_operations, no_ring=no_ring, ring_chosen=ring_chosen),
    )
    if hasattr(common, "WeightGradStore"):
        regions = tuple(_region(comm.reference()) for comm in communicators if comm.skipped != CUBLASMP)
        patches.replace(common.WeightGradStore, "put", functools.partial(_refuse_delayed, regions=regions))


def refuse_pipelined(name: str, quantised: bool) -> None:
    """The last use, if ``name`` is a dgrad: where it is asked for, and where a GEMM comes with it all the same."""
    if name.split("/")[0] in DGRAD_REDUCE_SCATTER and _cuts_by_rows(quantised):
        raise UBUnsupportedError(
            f"{name} with a pipelined reduce-scatter: TE cuts the weight of a dgrad GEMM at the wrong places there, "
            'and the gradients would be silently wrong. Use method "ring_exchange" for it, or leave it "bulk" without '
            "ub_overlap_rs_dgrad"
        )


def _cuts_by_rows(quantised: bool) -> bool:
    """Whether the weight of a dgrad GEMM is cut wrongly: all but those that TE transposes, in FP8 before Blackwell."""
    from transformer_engine.pytorch.utils import get_device_compute_capability

    return not (quantised and get_device_compute_capability() < (10, 0))


def _splits_by_rows(comm: Communicator) -> bool:
    """Whether a reduce-scatter that overlaps the dgrad GEMM is pipelined on this communicator."""
    ring = comm.spec is not None and comm.spec.method == "ring_exchange"
    return comm.name.split("/")[0] in DGRAD_REDUCE_SCATTER and not ring and comm.skipped != CUBLASMP


def _refuse_modules(
    original: Callable[..., Any], no_ring: Callable[[str], bool], skips_dgrad: bool
) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, inp: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (self.ub_bulk_wgrad or self.ub_overlap_rs_dgrad) and torch.is_grad_enabled():
            _check_module(self, inp, no_ring)
        if skips_dgrad and not inp.requires_grad and torch.is_grad_enabled():
            _check_gather(self)
        return original(self, inp, *args, **kwargs)

    return forward


def _check_module(module: Any, inp: torch.Tensor, no_ring: Callable[[str], bool]) -> None:
    # LayerNormMLP has none, and looks after its frozen weights itself. Asking a module for what it lacks takes long.
    name = vars(module).get("ub_name")
    refused = module.ub_bulk_wgrad and name is not None and _needs_dgrad(module, inp) and _is_frozen(module)
    if refused and not _backward_is_plain():
        raise UBUnsupportedError(
            f"{type(module).__name__} {name!r} has a frozen weight and ub_bulk_wgrad: TE would return "
            "dgrad without its reduce-scatter. Build the layer with ub_bulk_wgrad=False, ub_bulk_dgrad=False"
        )
    if module.ub_overlap_rs_dgrad and not module.ub_bulk_wgrad and not _backward_is_plain():
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

        _check_dgrad(f"{name or 'fc1'}_dgrad", no_ring, FP8GlobalStateManager.is_fp8_enabled())


def _backward_is_plain() -> bool:
    """Whether the recipe leaves the backward in high precision, where TE's layers overlap nothing (since 2.16)."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    enabled = FP8GlobalStateManager.is_fp8_enabled()
    return enabled and getattr(FP8GlobalStateManager.get_fp8_recipe(), "backward_override", None) is not None


def _needs_dgrad(module: Any, inp: torch.Tensor) -> bool:
    norm = (vars(module)["_parameters"].get(name) for name in ("layer_norm_weight", "layer_norm_bias"))
    return inp.requires_grad or any(parameter is not None and parameter.requires_grad for parameter in norm)


def _check_gather(module: Any) -> None:
    gathers = module.ub_bulk_dgrad or module.ub_overlap_ag_dgrad
    if gathers and not _is_frozen(module) and not _backward_is_plain():
        raise UBUnsupportedError(
            f"Linear {module.ub_name!r} has an input that needs no gradient: TE gathers in the dgrad GEMM, which it "
            "leaves out then, and the weight gradient would be silently wrong. Call requires_grad_() on the input, or "
            "build the layer without ub_bulk_dgrad (column-parallel) or ub_overlap_ag (row-parallel)"
        )


def _check_dgrad(layer: str, no_ring: Callable[[str], bool], quantised: bool) -> None:
    name = f"{layer}/fp8" if quantised else layer
    if no_ring(name):
        refuse_pipelined(name, quantised)


def _refuse_operations(
    original: Callable[..., Any], no_ring: Callable[[str], bool], ring_chosen: Callable[[str], bool]
) -> Callable[..., Any]:
    # The fused linear overlaps dgrad with its reduce-scatter when it computes no weight gradient, else in bulk.
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        frozen = not kwargs.get("weight_requires_grad", True)
        if frozen and kwargs.get("tensor_parallel_mode") == "column" and kwargs.get("input_requires_grad", True):
            quantised = bool(kwargs.get("with_quantized_compute", False))
            _check_dgrad(f"{kwargs['ub_comm_name']}_dgrad", no_ring, quantised)
        elif kwargs.get("tensor_parallel_mode") == "column" and ring_chosen(f"{kwargs['ub_comm_name']}_dgrad"):
            raise UBUnsupportedError(
                f"the policy chose ring_exchange for {kwargs['ub_comm_name']}_dgrad, but a fused linear of te.ops has "
                "a bulk overlap only: let the policy choose bulk for it, or use te.Linear"
            )
        return original(*args, **kwargs)

    return backward


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

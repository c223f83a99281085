# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel linear layers with sequence parallelism, on the host communicators, with TE's names.

Between two layers of a block each rank holds ``T/tp`` of the tokens; inside it holds all T tokens and ``1/tp`` of
the features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from ...errors import UBShapeError, UBUnsupportedError
from . import plain
from .backend import HostBackend, current_backend
from .functional import ColumnParallel, Overlap, RowParallel


class _ParallelLinear(nn.Module):
    """What both layers share: the backend, TE's name, and parameters drawn as in one process."""

    ub_names: ClassVar[tuple[str, ...]]
    _splits_bias: ClassVar[bool]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ub_name: str,
        dtype: torch.dtype = torch.float32,
        overlap: bool = True,
        backend: HostBackend | None = None,
    ) -> None:
        super().__init__()
        for features, what in ((in_features, "in_features"), (out_features, "out_features")):
            if type(features) is not int or features < 1:
                raise UBShapeError(f"{what} = {features!r}: it is a positive int")
        if ub_name not in self.ub_names:
            raise UBUnsupportedError(f"ub_name = {ub_name!r}: a {type(self).__name__} is {' or '.join(self.ub_names)}")
        self._backend = backend
        self.in_features, self.out_features = in_features, out_features
        self.ub_name, self.overlap = ub_name, overlap
        weight, own_bias = self._own(*_draw(in_features, out_features, bias, dtype))
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(own_bias) if own_bias is not None else None
        if self.bias is not None and not self._splits_bias:
            mark_sequence_parallel([self.bias])

    def _own(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's part of the whole parameters."""
        raise NotImplementedError

    def _share(self, features: int, what: str) -> slice:
        """This rank's features."""
        tp, rank = self.backend.tp, self.backend.group.rank
        if features % tp:
            raise UBShapeError(f"{what} = {features} cannot be split over {tp} TP ranks")
        return slice(rank * features // tp, (rank + 1) * features // tp)

    @property
    def backend(self) -> HostBackend:
        """The backend given to this layer, else that of ``initialize_ub`` at this moment."""
        return current_backend() if self._backend is None else self._backend

    def _how(self) -> Overlap:
        return Overlap(self.backend, self.ub_name, self.overlap)


class ColumnParallelLinear(_ParallelLinear):
    """``y = x @ W.t() + b`` with the rows of ``W [out_features, in_features]`` split over the TP ranks.

    Input ``[T/tp, in_features]`` or ``[S/tp, B, in_features]`` (dimension 0 is split), output ``[T, out/tp]``
    or ``[S, B, out/tp]``. ``ub_name``: ``"qkv"`` or ``"fc1"``. ``overlap=False`` takes plain collectives.
    Parameters are this rank's part of what ``nn.Linear`` draws, so ranks with one seed together hold one
    matrix.

    Raises :class:`UBShapeError` if the tokens do not match the active shape, before anything is sent.
    """

    ub_names = ("qkv", "fc1")
    _splits_bias = True

    def _own(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = self._share(self.out_features, "out_features")
        return weight[rows].clone(), None if bias is None else bias[rows].clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = _flat(x, self.in_features, self.weight)
        out = ColumnParallel.apply(flat, self.weight, self.bias, self._how())
        return _unflat(out, x)


class RowParallelLinear(_ParallelLinear):
    """``y = x @ W.t() + b`` with the columns of ``W [out_features, in_features]`` split over the TP ranks.

    Input ``[T, in/tp]`` or ``[S, B, in/tp]``, output ``[T/tp, out_features]`` or ``[S/tp, B, out_features]``.
    ``ub_name``: ``"proj"`` or ``"fc2"``. The bias is whole on every rank and is added after the reduction, so
    its gradient covers this rank's tokens only (``bias.sequence_parallel`` is True, as in Megatron):
    :func:`all_reduce_sequence_parallel_gradients` completes it.

    Raises :class:`UBShapeError` if the tokens do not match the active shape, before anything is sent.
    """

    ub_names = ("proj", "fc2")
    _splits_bias = False

    def _own(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        columns = self._share(self.in_features, "in_features")
        return weight[:, columns].clone(memory_format=torch.contiguous_format), bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tp = self.backend.tp
        if x.shape[0] % tp:
            raise UBShapeError(
                f"RowParallelLinear: dimension 0 of the input is {x.shape[0]}, not a multiple of tp = {tp}; "
                f"the next valid value is {x.shape[0] + tp - x.shape[0] % tp}"
            )
        flat = _flat(x, self.in_features // tp, self.weight)
        out = RowParallel.apply(flat, self.weight, self._how())
        if self.bias is not None:
            out = out + self.bias
        return _unflat(out, x)


def mark_sequence_parallel(parameters: Iterable[nn.Parameter]) -> None:
    """Mark parameters that each rank applies to its own tokens only, such as those of a LayerNorm."""
    for parameter in parameters:
        parameter.sequence_parallel = True  # type: ignore[attr-defined]


def all_reduce_sequence_parallel_gradients(module: nn.Module, backend: HostBackend | None = None) -> None:
    """Sum the gradients of the marked parameters over the TP ranks, after the backward. Collective."""
    engine = (current_backend() if backend is None else backend).engine
    marked = [
        parameter.grad
        for parameter in module.parameters()
        if getattr(parameter, "sequence_parallel", False) and parameter.grad is not None
    ]
    for dtype in sorted({grad.dtype for grad in marked}, key=str):
        grads = [grad for grad in marked if grad.dtype == dtype]
        if engine is None:
            return
        total = plain.all_reduce(engine, torch.cat([grad.reshape(-1) for grad in grads]))
        for grad, summed in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view(grad.shape))


def _draw(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The whole weight and bias, distributed as ``nn.Linear`` does it."""
    bound = 1 / math.sqrt(in_features)
    weight = torch.empty(out_features, in_features).uniform_(-bound, bound).to(dtype)
    return weight, torch.empty(out_features).uniform_(-bound, bound).to(dtype) if bias else None


def _unflat(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``out`` with the middle dimensions of ``x``; ``out`` itself, not a view of it, where there are none."""
    return out if x.dim() == 2 else out.view(-1, *x.shape[1:-1], out.shape[-1])


def _flat(x: torch.Tensor, features: int, weight: torch.Tensor) -> torch.Tensor:
    """``[..., features]`` as contiguous rows; what a GEMM would refuse is refused here, before anything is sent."""
    if x.dim() < 2 or x.shape[-1] != features:
        raise UBShapeError(f"the layer expects an input of [tokens, {features}], got {list(x.shape)}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise UBShapeError(
            f"the layer's weight is {weight.dtype} on {weight.device}, the input is {x.dtype} on {x.device}"
        )
    return x.reshape(-1, features).contiguous()

# SPDX-License-Identifier: Apache-2.0
"""The autograd Functions of the TP layers: which communicator overlaps with which GEMM, forward and backward.

========  ============================================  ===================================================
layer     forward                                       backward
========  ============================================  ===================================================
column    ring all-gather of x, chunk GEMMs             bulk all-gather of x beside the dgrad GEMM, then
                                                        bulk reduce-scatter of dgrad beside the wgrad GEMM
column,   the same                                      dgrad GEMM with reduce-scatter (ring or pipeline)
dgrad+RS                                                beside a ring all-gather of x, then the wgrad GEMM
row       GEMMs with reduce-scatter (pipeline or ring)  ring all-gather of the output's gradient with dgrad
                                                        GEMMs, then the wgrad GEMM
========  ============================================  ===================================================

What autograd keeps (this rank's input, the weight) never lies in registered memory, so a later microbatch may
overwrite every buffer before this one's backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ...errors import UBShapeError, UBUnsupportedError
from . import plain
from .backend import HostBackend
from .bulk import BulkAllGather, BulkReduceScatter
from .communicator import Communicator, gemm_span
from .pipeline import PipelineReduceScatter
from .ring import RingAllGather, RingReduceScatter

ChunkedReduceScatter = (PipelineReduceScatter, RingReduceScatter)
Kind = TypeVar("Kind", bound=Communicator)


@dataclass(frozen=True)
class Overlap:
    """Where a layer finds its communicators. ``overlap`` False: plain collectives, the same mathematics."""

    backend: HostBackend
    ub_name: str
    overlap: bool = True

    @property
    def tp(self) -> int:
        return self.backend.tp

    def name(self, step: str) -> str:
        """TE's name of the communicator of ``fprop``, ``dgrad`` or ``wgrad``."""
        return f"{self.ub_name}_{step}"

    def take(self, step: str, kind: type[Kind], tokens: int, dtype: torch.dtype) -> Kind | None:
        """The communicator of ``fprop``, ``dgrad`` or ``wgrad``, ready for ``tokens`` tokens of ``dtype``.

        None: a plain collective, because the layer does not overlap or the policy chose none at this T. Looked up at
        every call, so that a backward sees what its own T chooses.
        """
        if not self.overlap or self.tp == 1:
            return None
        communicator = self.backend.take(self.name(step), tokens)
        return None if communicator is None else _checked(communicator, kind, dtype)


def _checked(communicator: Communicator, kind: type[Kind], dtype: torch.dtype) -> Kind:
    if not isinstance(communicator, kind):
        raise UBUnsupportedError(
            f"{communicator.name}: this layer cannot use method {communicator.spec.method!r} "
            f"({communicator.spec.collective})"
        )
    if dtype != communicator.spec.dtype:
        raise UBShapeError(f"{communicator.name}: the buffer holds {communicator.spec.dtype}, the operand is {dtype}")
    return communicator


class ColumnParallel(torch.autograd.Function):
    """``x [T/tp, in]``, ``weight [out/tp, in]``, ``bias [out/tp]`` -> ``[T, out/tp]``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Overlap
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        gather = how.take("fprop", RingAllGather, x.shape[0] * how.tp, x.dtype)
        out = x.new_empty(x.shape[0] * how.tp, weight.shape[0])
        for rows, chunk in _gathered_chunks(x, gather, how, "fprop"):
            if bias is None:
                torch.mm(chunk, weight.t(), out=out[rows])
            else:
                torch.addmm(bias, chunk, weight.t(), out=out[rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_output = grad_output.contiguous()
        grad_x = torch.empty_like(x) if need_x else None
        dgrad = ctx.how.take("dgrad", Communicator, grad_output.shape[0], x.dtype)
        if dgrad is None:
            grad_weight = _column_plain(grad_output, x, weight, grad_x, need_weight, ctx.how)
        elif isinstance(dgrad, ChunkedReduceScatter):
            grad_weight = _column_dgrad_rs(grad_output, x, weight, grad_x, need_weight, ctx.how, dgrad)
        else:
            gather = _checked(dgrad, BulkAllGather, x.dtype)
            grad_weight = _column_bulk(grad_output, x, weight, grad_x, need_weight, ctx.how, gather)
        return grad_x, grad_weight, grad_output.sum(0) if need_bias else None, None


class RowParallel(torch.autograd.Function):
    """``x [T, in/tp]``, ``weight [out, in/tp]`` -> ``[T/tp, out]``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: Overlap) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        scatter = how.take("fprop", Communicator, x.shape[0], x.dtype)
        if scatter is None:
            partial = x @ weight.t()
            return partial if how.tp == 1 else plain.reduce_scatter(_engine(how), partial, how.name("fprop"))
        out = x.new_empty(x.shape[0] // how.tp, weight.shape[0])
        for rows, columns, block in _chunked(scatter).reduce_scatter_chunks(out):
            torch.mm(x[rows], weight[columns].t(), out=block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        grad_output = grad_output.contiguous()
        gather = ctx.how.take("dgrad", RingAllGather, grad_output.shape[0] * ctx.how.tp, grad_output.dtype)
        grad_x = torch.empty_like(x) if need_x else None
        whole = grad_output
        for rows, chunk in _gathered_chunks(grad_output, gather, ctx.how, "dgrad"):
            if grad_x is not None:
                torch.mm(chunk, weight, out=grad_x[rows])
            whole = chunk
        grad_weight = None
        if need_weight:
            if gather is not None:
                whole = gather.get_buffer()
            with gemm_span(f"{ctx.how.ub_name} wgrad"):
                grad_weight = whole.t() @ x
        return grad_x, grad_weight, None


def _gathered_chunks(
    local: torch.Tensor, gather: RingAllGather | None, how: Overlap, step: str
) -> Iterator[tuple[slice, torch.Tensor]]:
    """``local`` of every rank, chunk by chunk as it arrives, or whole where nothing overlaps."""
    if gather is None:
        whole = local if how.tp == 1 else plain.all_gather(_engine(how), local, how.name(step))
        return iter([(slice(0, whole.shape[0]), whole)])
    gather.copy_into_buffer(local, local_chunk=True)
    return gather.all_gather_chunks()


def _column_bulk(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_x: torch.Tensor | None,
    need_weight: bool,
    how: Overlap,
    dgrad: BulkAllGather,
) -> torch.Tensor | None:
    """TE's default: each collective runs beside the GEMM that does not need it. ``grad_x`` is filled if given."""
    gather = dgrad if need_weight else None
    scatter = None
    if grad_x is not None:
        scatter = how.take("wgrad", BulkReduceScatter, grad_output.shape[0], x.dtype)
        assert scatter is not None, "wgrad follows dgrad"
    grad_weight = None
    if gather is not None:
        gather.copy_into_buffer(x, local_chunk=True)
    with gather.all_gather() if gather is not None else _nothing():
        if scatter is not None:
            with gemm_span(f"{how.ub_name} dgrad"):
                torch.mm(grad_output, weight, out=scatter.get_buffer())
    with scatter.reduce_scatter(grad_x) if scatter is not None and grad_x is not None else _nothing():
        if gather is not None:
            with gemm_span(f"{how.ub_name} wgrad"):
                grad_weight = grad_output.t() @ gather.get_buffer()
    return grad_weight


def _column_dgrad_rs(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_x: torch.Tensor | None,
    need_weight: bool,
    how: Overlap,
    scatter: PipelineReduceScatter | RingReduceScatter,
) -> torch.Tensor | None:
    """dgrad is reduce-scattered chunk by chunk; x is gathered beside that if the forward overlaps."""
    gather = how.take("fprop", RingAllGather, grad_output.shape[0], x.dtype) if need_weight else None
    if gather is not None:
        gather.copy_into_buffer(x, local_chunk=True)
    with gather.all_gather() if gather is not None else _nothing():
        if grad_x is not None:
            for rows, columns, block in scatter.reduce_scatter_chunks(grad_x):
                torch.mm(grad_output[rows], weight[:, columns], out=block)
    if not need_weight:
        return None
    whole = plain.all_gather(_engine(how), x, how.name("wgrad")) if gather is None else gather.get_buffer()
    with gemm_span(f"{how.ub_name} wgrad"):
        return grad_output.t() @ whole


def _column_plain(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_x: torch.Tensor | None,
    need_weight: bool,
    how: Overlap,
) -> torch.Tensor | None:
    """The same results with one collective after the other."""
    if grad_x is not None:
        partial = grad_output @ weight
        grad_x.copy_(partial if how.tp == 1 else plain.reduce_scatter(_engine(how), partial, how.name("dgrad")))
    if not need_weight:
        return None
    return grad_output.t() @ (x if how.tp == 1 else plain.all_gather(_engine(how), x, how.name("wgrad")))


def _chunked(communicator: Communicator) -> PipelineReduceScatter | RingReduceScatter:
    if isinstance(communicator, ChunkedReduceScatter):
        return communicator
    raise UBUnsupportedError(
        f"{communicator.name}: a GEMM with reduce-scatter needs method 'pipeline' or 'ring_exchange', "
        f"not {communicator.spec.method!r}"
    )


def _engine(how: Overlap) -> Any:
    return how.backend.engine


def _nothing() -> AbstractContextManager[None]:
    return nullcontext()

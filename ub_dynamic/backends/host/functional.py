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

    @property
    def overlaps(self) -> bool:
        return self.overlap and self.tp > 1

    def communicator(self, step: str) -> Communicator:
        """That of ``fprop``, ``dgrad`` or ``wgrad``, unchecked."""
        return self.backend.communicator(f"{self.ub_name}_{step}")

    def take(self, step: str, kind: type[Kind], tokens: int, dtype: torch.dtype) -> Kind:
        """The same, ready to take an operand of ``tokens`` tokens and ``dtype``."""
        name = f"{self.ub_name}_{step}"
        communicator = self.backend.communicator(name)
        if not isinstance(communicator, kind):
            raise UBUnsupportedError(
                f"{name}: this layer cannot use method {communicator.spec.method!r} ({communicator.spec.collective})"
            )
        if dtype != communicator.spec.dtype:
            raise UBShapeError(f"{name}: the buffer holds {communicator.spec.dtype}, the operand is {dtype}")
        self.backend.operand(name, tokens)
        return communicator


class ColumnParallel(torch.autograd.Function):
    """``x [T/tp, in]``, ``weight [out/tp, in]``, ``bias [out/tp]`` -> ``[T, out/tp]``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Overlap
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        out = x.new_empty(x.shape[0] * how.tp, weight.shape[0])
        for rows, chunk in _gathered_chunks(x, "fprop", how):
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
        grad_weight = None
        if not ctx.how.overlaps:
            grad_weight = _column_plain(grad_output, x, weight, grad_x, need_weight, ctx.how)
        elif isinstance(ctx.how.communicator("dgrad"), ChunkedReduceScatter):
            grad_weight = _column_dgrad_rs(grad_output, x, weight, grad_x, need_weight, ctx.how)
        else:
            grad_weight = _column_bulk(grad_output, x, weight, grad_x, need_weight, ctx.how)
        return grad_x, grad_weight, grad_output.sum(0) if need_bias else None, None


class RowParallel(torch.autograd.Function):
    """``x [T, in/tp]``, ``weight [out, in/tp]`` -> ``[T/tp, out]``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: Overlap) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        if how.tp == 1:
            return x @ weight.t()
        if not how.overlap:
            return plain.reduce_scatter(_engine(how), x @ weight.t())
        out = x.new_empty(x.shape[0] // how.tp, weight.shape[0])
        scatter = how.take("fprop", Communicator, x.shape[0], x.dtype)
        for rows, columns, block in _chunked(scatter).reduce_scatter_chunks(out):
            torch.mm(x[rows], weight[columns].t(), out=block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        grad_output = grad_output.contiguous()
        grad_x = torch.empty_like(x) if need_x else None
        whole = grad_output
        for rows, chunk in _gathered_chunks(grad_output, "dgrad", ctx.how):
            if grad_x is not None:
                torch.mm(chunk, weight, out=grad_x[rows])
            whole = chunk
        grad_weight = None
        if need_weight:
            if ctx.how.overlaps:
                whole = ctx.how.communicator("dgrad").get_buffer()
            with gemm_span(f"{ctx.how.ub_name} wgrad"):
                grad_weight = whole.t() @ x
        return grad_x, grad_weight, None


def _gathered_chunks(local: torch.Tensor, step: str, how: Overlap) -> Iterator[tuple[slice, torch.Tensor]]:
    """``local`` of every rank, chunk by chunk as it arrives, or whole where nothing overlaps."""
    tokens = local.shape[0] * how.tp
    if how.tp == 1:
        return iter([(slice(0, tokens), local)])
    if not how.overlap:
        return iter([(slice(0, tokens), plain.all_gather(_engine(how), local))])
    gather = how.take(step, RingAllGather, tokens, local.dtype)
    gather.copy_into_buffer(local, local_chunk=True)
    return gather.all_gather_chunks()


def _column_bulk(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_x: torch.Tensor | None,
    need_weight: bool,
    how: Overlap,
) -> torch.Tensor | None:
    """TE's default: each collective runs beside the GEMM that does not need it. ``grad_x`` is filled if given."""
    tokens, dtype = grad_output.shape[0], x.dtype
    gather = how.take("dgrad", BulkAllGather, tokens, dtype) if need_weight else None
    scatter = how.take("wgrad", BulkReduceScatter, tokens, dtype) if grad_x is not None else None
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
) -> torch.Tensor | None:
    """dgrad is reduce-scattered chunk by chunk; x is gathered beside that in the buffer of the forward."""
    tokens, dtype = grad_output.shape[0], x.dtype
    gather = how.take("fprop", RingAllGather, tokens, dtype) if need_weight else None
    scatter = how.take("dgrad", Communicator, tokens, dtype) if grad_x is not None else None
    if gather is not None:
        gather.copy_into_buffer(x, local_chunk=True)
    with gather.all_gather() if gather is not None else _nothing():
        if scatter is not None and grad_x is not None:
            for rows, columns, block in _chunked(scatter).reduce_scatter_chunks(grad_x):
                torch.mm(grad_output[rows], weight[:, columns], out=block)
    if gather is None:
        return None
    with gemm_span(f"{how.ub_name} wgrad"):
        return grad_output.t() @ gather.get_buffer()


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
        grad_x.copy_(partial if how.tp == 1 else plain.reduce_scatter(_engine(how), partial))
    if not need_weight:
        return None
    return grad_output.t() @ (x if how.tp == 1 else plain.all_gather(_engine(how), x))


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

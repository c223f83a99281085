# SPDX-License-Identifier: Apache-2.0
"""What an overlap is compared with, in the same run: plain collectives, PyTorch's async TP, cuBLASMp, the GEMM alone.

Whether a peer can be measured here (``available``: a reason, or None) stands apart from how it runs (``make``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..manager import Manager
from ..overlap import OverlapConfig
from .operations import Gemm
from .subject import Operation, Subject, Switched
from .worlds import World, refusal


@dataclass(frozen=True)
class Setting:
    """What an arm is made for: one GEMM at sizes, on communicators that stand already."""

    world: World
    manager: Manager
    gemm: Gemm
    hidden: int
    ffn: int
    capacity: int


class Arm(Protocol):
    def block(self, tokens: int, steps: int) -> float:
        """Milliseconds a step on this rank."""

    def close(self) -> None:
        """Give back what was registered, all ranks together."""


@dataclass(frozen=True)
class Peer:
    """``available``: why it cannot be measured in this world for this GEMM, or None."""

    name: str
    text: str
    available: Callable[[World, Gemm], str | None]
    make: Callable[[Setting], Arm]


class Configured:
    """One configuration of the registered communicators."""

    def __init__(self, switched: Switched, config: OverlapConfig | None) -> None:
        self._switched, self._config = switched, config

    def block(self, tokens: int, steps: int) -> float:
        return self._switched.block(self._config, tokens, steps)

    def close(self) -> None:
        return


class Plain:
    """The GEMM alone: the limit."""

    def __init__(self, setting: Setting) -> None:
        self._operation = Operation(
            setting.world, setting.gemm, setting.hidden, setting.ffn, setting.capacity, plain=True
        )

    def block(self, tokens: int, steps: int) -> float:
        return self._operation.block(tokens, steps)

    def close(self) -> None:
        return


class AsyncTP:
    """``torch.ops.symm_mem``: fused all-gather + matmul, fused matmul + reduce-scatter, called directly.

    The backward of a column-parallel linear gathers the input with NCCL beside the fused dgrad; that of a row-parallel
    one reuses the gathered gradient, as torch's own pass for compiled models does.
    """

    def __init__(self, setting: Setting) -> None:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        world: Any = setting.world
        self._world, self._gemm, self._group = setting.world, setting.gemm, world.world.tp_group
        self._name = self._group.group_name
        enable_symm_mem_for_group(self._name)
        local = setting.gemm.local_features(setting.hidden, setting.ffn, setting.world.size)
        self._weight = setting.world.random((local[1], local[0]), 3)
        self._operand = setting.world.random((setting.capacity, local[0]), 1)
        self._grad = setting.world.random((setting.capacity, local[1]), 2)

    def block(self, tokens: int, steps: int) -> float:
        operand, _ = self.operands(tokens)
        if not self._gemm.backward:
            return self._world.timed(lambda _: self.forward(operand), steps)
        grad = self._grad[: self._gemm.local_rows(tokens, self._world.size)[1]]
        backward = self._column_backward if self._gemm.column else self._row_backward
        return self._world.timed(lambda _: backward(operand, grad), steps)

    def operands(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's rows of the input at T = ``tokens``, and its shard ``[out, in]`` of the weight."""
        return self._operand[: self._gemm.local_rows(tokens, self._world.size)[0]], self._weight

    def forward(self, operand: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the product."""
        right = self._weight.t()
        return self._gather(operand, right)[1] if self._gemm.column else self._scatter(operand, right)

    def _gather(self, part: torch.Tensor, right: torch.Tensor, keep: bool = False) -> tuple[Any, torch.Tensor]:
        whole, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(part, [right], 0, self._name, return_A=keep)
        return whole, product

    def _scatter(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(left, right, "sum", 0, self._name)
        return summed

    def _column_backward(self, operand: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        whole = operand.new_empty((operand.shape[0] * self._world.size, operand.shape[1]))
        gathering = torch.distributed.all_gather_into_tensor(whole, operand, group=self._group, async_op=True)
        self._scatter(grad, self._weight)
        gathering.wait()
        return grad.t() @ whole

    def _row_backward(self, operand: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        whole, _ = self._gather(grad, self._weight, keep=True)
        product: torch.Tensor = whole.t() @ operand
        return product

    def close(self) -> None:
        return


class CublasMp:
    """TE's own cuBLASMp communicators, beside the registered ones; TE's table names them during a block."""

    def __init__(self, setting: Setting) -> None:
        import transformer_engine.pytorch.module.base as base

        from ..testing.te_world import quantization_modes

        world: Any = setting.world
        self._base, self._world, self._backend = base, world, setting.manager.backend
        standing, base._ub_communicators = base._ub_communicators, None
        try:
            base.initialize_ub(
                [setting.capacity, setting.hidden],
                world.size,
                quantization_modes=quantization_modes(["none"]),
                dtype=world.dtype,
                bootstrap_backend="nccl",
                with_cublasmp=True,
            )
            self._own = base._ub_communicators
        finally:
            base._ub_communicators, base._ub_with_cublasmp, base._ub_initialized = standing, False, True
        before, after = setting.gemm.features(setting.hidden, setting.ffn)
        column = setting.gemm.column
        flags = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": column}
        with self._standing():
            layer = world.linear(setting.gemm.layer, before, after, "column" if column else "row", flags)
        local = setting.gemm.local_features(setting.hidden, setting.ffn, world.size)
        self._gemm, self._subject = setting.gemm, Subject(world, setting.gemm, layer, local, setting.capacity)

    @contextmanager
    def _standing(self) -> Iterator[None]:
        base = self._base
        self._backend.switch(self._backend.plan({}))  # or its layers would read the flags of the last choice
        other = base._ub_communicators
        base._ub_communicators, base._ub_with_cublasmp = self._own, True
        try:
            yield
        finally:
            base._ub_communicators, base._ub_with_cublasmp = other, False

    def block(self, tokens: int, steps: int) -> float:
        rows, rows_out = self._gemm.local_rows(tokens, self._world.size)
        with self._standing():
            return self._subject.block(rows, steps, rows_out)

    def close(self) -> None:
        self._world.meet()
        self._own = {}
        self._world.meet()


def _always(world: World, gemm: Gemm) -> str | None:
    return None


def _plain_collectives(world: World, gemm: Gemm) -> str | None:
    return refusal(world.mode, "none")


def _async_tp(world: World, gemm: Gemm) -> str | None:
    if world.backend != "te":
        return "async_tp: PyTorch's symmetric memory needs CUDA"
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        if not hasattr(torch.ops.symm_mem, name):
            return f"async_tp: torch {torch.__version__} has no torch.ops.symm_mem.{name}"
    return refusal(world.mode, "async_tp")


def _cublasmp(world: World, gemm: Gemm) -> str | None:
    if world.backend != "te":
        return "cublasmp: needs Transformer Engine"
    if (reason := refusal(world.mode, "cublasmp")) is not None:
        return reason
    return None if built_with_cublasmp() else "cublasmp: this Transformer Engine is built without NVTE_WITH_CUBLASMP"


def built_with_cublasmp() -> bool:
    """Whether the installed TE has the cuBLASMp kernels (2.17 and later know the question)."""
    import ctypes

    import transformer_engine.pytorch  # noqa: F401  # loads the library

    answer = getattr(ctypes.CDLL(None), "_Z24nvte_built_with_cublasmpv", None)
    if answer is None:
        return False
    answer.restype = ctypes.c_bool
    return bool(answer())


def _configured(config: OverlapConfig | None) -> Callable[[Setting], Arm]:
    def make(setting: Setting) -> Arm:
        return Configured(switched_of(setting), config)

    return make


def switched_of(setting: Setting) -> Switched:
    """The GEMM's operation on the registered communicators."""
    operation = Operation(setting.world, setting.gemm, setting.hidden, setting.ffn, setting.capacity)
    return Switched(setting.manager, setting.gemm, operation)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("default", "as TE configures it", _always, _configured(None)),
        Peer(
            "none",
            "plain collective, then the GEMM (NCCL on GPUs)",
            _plain_collectives,
            _configured(OverlapConfig("none")),
        ),
        Peer("async_tp", "torch.ops.symm_mem fused operations", _async_tp, AsyncTP),
        Peer("cublasmp", "TE's cuBLASMp overlap", _cublasmp, CublasMp),
        Peer("plain", "the GEMM without tensor parallelism: the limit", _always, Plain),
    )
}

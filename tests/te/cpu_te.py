# SPDX-License-Identifier: Apache-2.0
"""TE's own Python modules on the host: their real code calls recorded kernels around real communicator objects.

Only what needs a device is replaced: the GEMM, the layer norm, and questions about CUDA. One process stands for one
rank of ``TP``; nothing is communicated, so shapes and the order of calls are what can be tested here, not values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import fakes
import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
import transformer_engine.pytorch.cpp_extensions.gemm as gemm
import transformer_engine.pytorch.distributed as te_distributed
import transformer_engine.pytorch.module.base as base
import transformer_engine.pytorch.module.layernorm_linear as layernorm_linear
import transformer_engine.pytorch.module.layernorm_mlp as layernorm_mlp
import transformer_engine.pytorch.module.linear as linear
import transformer_engine.pytorch.utils as utils
import transformer_engine_torch as tex

from ub_dynamic.backends.names import DGRAD_REDUCE_SCATTER
from ub_dynamic.backends.te import native, shutdown
from ub_dynamic.backends.te.backend import TEBackend
from ub_dynamic.backends.te.communicators import communicator_name, read_communicators
from ub_dynamic.backends.te.initialize import _register
from ub_dynamic.groups import SoloGroup
from ub_dynamic.manager import Manager

TP, CAPACITY, HIDDEN = 2, 256, 64
RS = tex.CommOverlapType.RS


@dataclass
class Call:
    """One overlap that was enqueued: communicator, T of its operand, T that its buffer had then."""

    name: str | None
    tokens: int
    active: int | None
    kind: str


@dataclass
class World:
    """A backend over real communicator objects, and the GEMMs that reached the library."""

    backend: TEBackend
    manager: Manager
    calls: list[Call] = field(default_factory=list)

    def overlaps(self) -> list[Call]:
        return [call for call in self.calls if call.name is not None]


def comm(name: str, mode: str = "none") -> Any:
    """The communicator that TE has under this name."""
    return base._ub_communicators[name, fakes.MODES(mode)]


def rows(tokens: int, columns: int = HIDDEN) -> torch.Tensor:
    """An operand."""
    return torch.zeros(tokens, columns, dtype=torch.bfloat16)


def weight(out: int = HIDDEN, columns: int = HIDDEN) -> torch.Tensor:
    return rows(out, columns)


@contextmanager
def te_world(
    patch: pytest.MonkeyPatch,
    *,
    guard: bool = True,
    auto: bool = False,
    modes: tuple[str, ...] = ("none",),
    **methods: str,
) -> Iterator[World]:
    """TE initialised at ``[CAPACITY, HIDDEN]``; ``methods`` overrides the method of single communicators."""
    _without_a_device(patch)
    calls: list[Call] = []
    table = fakes.table((CAPACITY, HIDDEN), TP, modes=modes, **methods)
    patch.setattr(base, "_ub_communicators", table)
    patch.setattr(base, "_ub_initialized", True, raising=False)
    patch.setattr(tex, "CommOverlap", fakes.Base)
    patch.setattr(tex, "CommOverlapP2P", fakes.Ring)
    patch.setattr(tex, "generic_gemm", _recorded_gemm(calls, {id(comm): key[0] for key, comm in table.items()}))
    module, group = native.load(), SoloGroup()
    dgrads = [name for name in DGRAD_REDUCE_SCATTER if methods.get(name) == "pipeline"]
    pipelined = [communicator_name((name, mode)) for name in dgrads for mode in modes]
    communicators = read_communicators(table, (CAPACITY, HIDDEN), TP, module, "", pipelined)
    registry, reason = _register(module, communicators, group)
    assert not reason
    bootstrap = shutdown.Bootstrap()
    backend = TEBackend(communicators, (CAPACITY, HIDDEN), group, native=module, registry=registry, bootstrap=bootstrap)
    manager = Manager(backend, (CAPACITY, HIDDEN), check="never", guard=guard, auto=auto)
    try:
        yield World(backend, manager, calls)
    finally:
        backend.connect(None)


def _without_a_device(patch: pytest.MonkeyPatch) -> None:
    def prepare_forward(self: Any, inp: torch.Tensor, num_gemms: int = 1, **_: Any) -> torch.Tensor:
        self.allow_different_data_and_param_types = self.forwarded_at_least_once = True
        self.set_activation_dtype(inp)
        self.init_fp8_metadata(num_gemms=num_gemms)
        return inp

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    kind = base.TransformerEngineBaseModule
    if hasattr(kind, "end_forward"):
        patch.setattr(kind, "prepare_forward", prepare_forward)
    else:  # older versions have a context manager
        patch.setattr(kind, "prepare_forward", lambda *args, **more: nullcontext(prepare_forward(*args, **more)))
    patch.setattr(gemm, "get_cublas_workspace", lambda *_: torch.empty(16, dtype=torch.uint8))
    patch.setattr(utils, "_empty_tensor", torch.Tensor)
    patch.setattr(dist, "get_world_size", lambda group=None: TP)
    for module in (linear, layernorm_linear, layernorm_mlp, te_distributed):
        if hasattr(module, "get_distributed_world_size"):
            patch.setattr(module, "get_distributed_world_size", lambda group=None: TP)
    for module in (layernorm_linear, layernorm_mlp):
        patch.setattr(module, "apply_normalization", _normalization)
    for module in (linear, layernorm_linear, layernorm_mlp, base):
        for name, function in (("gather_along_first_dim", _gather), ("reduce_scatter_along_first_dim", _scatter)):
            if hasattr(module, name):
                patch.setattr(module, name, function)
    patch.setattr(tex, "layernorm_bwd", lambda dy, x, *rest: (dy.clone(), None, None))
    patch.setattr(tex, "relu", lambda x, quantizer: torch.relu(x))
    patch.setattr(tex, "drelu", lambda grad, x, quantizer: grad * (x > 0))


def _gather(inp: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    return torch.cat([inp] * TP), None


def _scatter(inp: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    return inp[: inp.shape[0] // TP].clone(), None


def _normalization(inp: torch.Tensor, out: Any, weight: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, Any, Any]:
    return inp.clone(), torch.zeros(inp.shape[0]), torch.ones(inp.shape[0])


def _recorded_gemm(calls: list[Call], names: dict[int, str]) -> Any:
    def generic_gemm(
        A: torch.Tensor, transA: bool, B: torch.Tensor, transB: bool, D: Any, *rest: Any,
        comm_overlap: Any = None, comm_type: Any = None, extra_output: Any = None, bulk_overlap: bool = False,
        **_: Any,
    ) -> list[Any]:  # fmt: skip
        a, b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
        active = None
        if comm_overlap is not None:
            facts = native.load().inspect(comm_overlap)
            active = facts["shape"][0]
            if facts["is_p2p"]:
                active = active // len(facts["chunks"]) * TP
        kind = ("bulk " if bulk_overlap else "") + ("rs" if comm_type == RS else "ag")
        name = None if comm_overlap is None else names[id(comm_overlap)]
        result = (b.T if transB else b) @ (a.T if transA else a)
        if D is not None:
            assert D.shape == result.shape, "GEMM output has invalid dims"
            D.copy_(result)
            result = D
        calls.append(Call(name, b.shape[0], active, kind))
        return [result, None, None, extra_output]

    return generic_gemm


def layer(kind: str, name: str, **flags: Any) -> torch.nn.Module:
    """A TE layer of this rank, without bias, on the host."""
    shared = {
        "bias": False, "device": "cpu", "params_dtype": torch.bfloat16, "sequence_parallel": True,
        "tp_group": object(), "tp_size": TP,
    }  # fmt: skip
    if kind == "mlp":
        return te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="relu", set_parallel_mode=True, **shared, **flags)
    made = te.LayerNormLinear if kind == "layernorm" else te.Linear
    mode = "row" if name in ("proj", "fc2") else "column"
    sizes = (2 * HIDDEN, HIDDEN) if mode == "row" else (HIDDEN, 2 * HIDDEN)
    return made(*sizes, parallel_mode=mode, ub_name=name, **shared, **flags)


def operand(module: torch.nn.Module, tokens: int) -> torch.Tensor:
    """This rank's input of a microbatch of ``tokens``: whole rows for a row-parallel layer, its share otherwise."""
    row = getattr(module, "parallel_mode", "column") == "row"
    shape = (tokens, 2 * HIDDEN // TP) if row else (tokens // TP, HIDDEN)
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

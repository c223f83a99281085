# SPDX-License-Identifier: Apache-2.0
"""Communicator objects of the real library without a GPU: TE's C++ classes, over memory of the host.

``tex.CommOverlapBase`` and ``tex.CommOverlapP2PBase`` can be default-constructed; a test-only native helper gives
them the members that their constructors set on a GPU. Only ``get_buffer`` and ``copy_into_buffer``, which need CUDA
tensors, are written here, with the checks that TE's own have.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex

from ub_dynamic.backends.names import LAYERS
from ub_dynamic.backends.te import build, native

SOURCE = Path(__file__).parent / "csrc" / "fill.cpp"
MODES = te.UserBufferQuantizationMode


@cache
def helper() -> ModuleType:
    """The native test helper, compiled like the native file."""
    tools = build.find_toolchain()
    target = build.cache_folder() / f"test-fill-{tools.key}-{SOURCE.stat().st_mtime_ns}.so"
    if not target.exists():
        build.compile_file(tools, SOURCE, target)
    spec = importlib.util.spec_from_file_location("fill", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Buffer:
    """What ``get_buffer`` and ``copy_into_buffer`` do in TE's extension, for host memory."""

    memory: torch.Tensor

    def get_buffer(self, local_chunk: bool = False, shape: Any = None) -> torch.Tensor:
        facts = native.load().inspect(self)
        pointer, numel, itemsize = facts["data_ptr"], math.prod(facts["shape"]), facts["itemsize"]
        tp, rank = facts["tp_size"], facts["tp_id"]
        local = math.prod(facts["chunks"][rank][1:]) if facts["is_p2p"] else numel // tp
        if shape is None:
            shape = [facts["shape"][0] // (tp if local_chunk else 1), facts["shape"][1]]
        elif math.prod(shape) != (local if local_chunk else numel):
            raise RuntimeError("Invalid shape for a Userbuffers buffer")
        if local_chunk:
            pointer = facts["chunks"][rank][0] if facts["is_p2p"] else pointer + local * rank * itemsize
        raw = (ctypes.c_uint8 * (math.prod(shape) * itemsize)).from_address(pointer)
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(getattr(torch, facts["dtype"]))
        return flat.view(list(shape))

    def copy_into_buffer(self, input: torch.Tensor, local_chunk: bool = False) -> None:
        self.get_buffer(local_chunk, list(input.shape)).copy_(input)


class Base(_Buffer, tex.CommOverlapBase):
    """Stands for ``tex.CommOverlap``, which derives from the same base."""

    get_buffer = _Buffer.get_buffer
    copy_into_buffer = _Buffer.copy_into_buffer


class Ring(_Buffer, tex.CommOverlapP2PBase):
    """Stands for ``tex.CommOverlapP2P``, which derives from the same base."""

    get_buffer = _Buffer.get_buffer
    copy_into_buffer = _Buffer.copy_into_buffer


def communicator(
    ring: bool,
    shape: tuple[int, int],
    tp: int = 2,
    *,
    rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    reduce_scatter: bool = False,
    num_splits: int = 4,
    num_sm: int = 16,
    region: int = 1,
) -> Any:
    """One communicator at capacity ``shape``, as TE's constructors leave it."""
    made = Ring() if ring else Base()
    fill(made, shape, tp, rank, dtype, reduce_scatter, num_splits, num_sm, region)
    # Its destructor would free streams and events that were never made.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


def fill(
    made: Any, shape: tuple[int, int], tp: int, rank: int, dtype: torch.dtype, reduce_scatter: bool, num_splits: int,
    num_sm: int, region: int,
) -> None:  # fmt: skip
    """Give a default-constructed object what TE's constructor gives it, and memory."""
    tokens, hidden = shape
    rows = tokens // tp * (2 * tp - 1) if isinstance(made, tex.CommOverlapP2PBase) and reduce_scatter else tokens
    made.memory = torch.zeros(rows * hidden, dtype=dtype)
    address, itemsize = made.memory.data_ptr(), dtype.itemsize
    helper().fill(made, address, tokens, hidden, itemsize, tp, rank, reduce_scatter, num_splits, num_sm, region)


def table(
    shape: tuple[int, int], tp: int = 2, *, modes: tuple[str, ...] = ("none",), rank: int = 0, **methods: str
) -> dict[Any, Any]:
    """All communicators as ``initialize_ub`` makes them; ``methods`` overrides the method of single layers."""
    made = {}
    for mode in modes:
        for layer, (default, collective) in LAYERS.items():
            method = methods.get(layer, default)
            scatters = collective == "rs" or (layer in ("qkv_dgrad", "fc1_dgrad") and method != "bulk")
            fp8 = mode == "fp8" and not scatters
            ring = method == "ring_exchange"
            made[layer, MODES(mode)] = communicator(
                ring,
                shape,
                tp,
                rank=rank,
                dtype=torch.uint8 if fp8 else torch.bfloat16,
                reduce_scatter=scatters,
                num_splits=tp if ring else 4,
                num_sm=1 if ring else 16,
                region=len(made) + 1,
            )
    return made

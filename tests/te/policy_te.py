# SPDX-License-Identifier: Apache-2.0
"""TE's own ``initialize_ub`` on the host, around communicators that are constructed as TE constructs them.

Its real code runs; the two classes that it constructs take the same arguments and make objects of the real library
over memory of the host (:mod:`fakes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fakes
import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
import transformer_engine.pytorch.module.base as base
import transformer_engine_torch as tex
from cpu_te import CAPACITY, HIDDEN, TP, Call, _recorded_gemm, _without_a_device

from ub_dynamic.backends.te import create_te_backend, flags
from ub_dynamic.backends.te.backend import TEBackend
from ub_dynamic.groups import SoloGroup
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Policy

NONE, RING, BULK = OverlapConfig("none"), OverlapConfig("ring_exchange"), OverlapConfig("bulk")
AGGREGATE = OverlapConfig("ring_exchange", aggregate=True)
PIPELINE = OverlapConfig("pipeline", num_sm=4, num_splits=2)
EVERYTHING = {
    "qkv_fprop": (AGGREGATE, NONE),
    "qkv_dgrad": (RING, OverlapConfig("bulk", num_sm=2), NONE),
    "proj_fprop": (RING, PIPELINE, OverlapConfig("pipeline", num_sm=8, num_splits=8, first_gemm=True), NONE),
    "proj_dgrad": (RING, NONE),
    "fc1_fprop": (AGGREGATE, NONE),
    "fc1_dgrad": (RING, BULK, NONE),
    "fc2_fprop": (RING, PIPELINE, NONE),
    "fc2_dgrad": (AGGREGATE, NONE),
}
FLAGS = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}
COLUMN = {name: value for name, value in FLAGS.items() if name != "ub_overlap_rs"}
ROW = {"ub_overlap_ag": True, "ub_overlap_rs": True}
SMS = 132
made: list[tuple[str, tuple[int, int], dict[str, Any]]] = []  # class, shape, keywords, in order of construction


class Overlap(fakes.Base):
    """``tex.CommOverlap``."""

    get_buffer = fakes._Buffer.get_buffer
    copy_into_buffer = fakes._Buffer.copy_into_buffer

    def __init__(
        self, buffer_shape: Any, buffer_dtype: torch.dtype, helper: Any, tp_size: int, use_cublasmp: bool = False,
        comm_type: Any = tex.CommOverlapType.RS, num_splits: int = 4, num_max_streams: int = 3, comm_cga_size: int = 2,
        gemm_priority: int = 0, comm_priority: int = 0, num_comm_sm: int = 16, set_sm_margin: bool = True,
        atomic_gemm: bool = False, rs_overlap_first_gemm: bool = False,
    ) -> None:  # fmt: skip
        keywords = {k: v for k, v in locals().items() if k not in ("self", "helper", "buffer_shape", "__class__")}
        super().__init__()
        assert helper == "helper"
        made.append(("CommOverlap", tuple(buffer_shape), keywords))
        fakes.fill(self, tuple(buffer_shape), tp_size, 0, buffer_dtype, False, num_splits, num_comm_sm, _region())
        _finish(self, buffer_shape[0], set_sm_margin, first_gemm=rs_overlap_first_gemm)


class Ring(fakes.Ring):
    """``tex.CommOverlapP2P``."""

    get_buffer = fakes._Buffer.get_buffer
    copy_into_buffer = fakes._Buffer.copy_into_buffer

    def __init__(
        self, buffer_shape: Any, buffer_dtype: torch.dtype, helper: Any, tp_size: int, comm_type: Any,
        num_max_streams: int = 3, comm_cga_size: int = 1, gemm_priority: int = 0, comm_priority: int = 0,
        num_comm_sm: int = 1, set_sm_margin: bool = False, atomic_gemm: bool = False, use_ce: bool = True,
        aggregate: bool = False, use_cublasmp: bool = False,
    ) -> None:  # fmt: skip
        keywords = {k: v for k, v in locals().items() if k not in ("self", "helper", "buffer_shape", "__class__")}
        super().__init__()
        assert helper == "helper"
        made.append(("CommOverlapP2P", tuple(buffer_shape), keywords))
        scatters = comm_type == tex.CommOverlapType.RS
        fakes.fill(self, tuple(buffer_shape), tp_size, 0, buffer_dtype, scatters, tp_size, num_comm_sm, _region())
        _finish(self, buffer_shape[0], set_sm_margin, aggregate=aggregate)


def _finish(made: Any, tokens: int, margin: bool, aggregate: int = -1, first_gemm: int = -1) -> None:
    """What else TE's constructors do with their arguments."""
    module = fakes.native.load()
    registry = module.Registry()
    registry.add(made, tokens)
    num_splits, num_sm, _ = module.settings(made)
    setting = (0, num_splits, num_sm, SMS - num_sm if margin else SMS, int(aggregate), int(first_gemm))
    registry.plan([setting], [])()


def _region() -> int:
    return len(made) if len(made) <= limit["regions"] else -1


limit = {"regions": 31}


class Twin(SoloGroup):
    """The TP group of a rank whose peer does as it does."""

    rank, size = 0, TP
    members = tuple(range(TP))

    def allgather(self, value: Any, what: str) -> list[Any]:
        return [value] * TP


@dataclass
class World:
    """A backend with alternatives, and the GEMMs that reached the library."""

    backend: TEBackend
    calls: list[Call] = field(default_factory=list)

    def overlaps(self) -> list[str]:
        """``communicator kind`` of each overlap since the last look."""
        found = [f"{call.name} {call.kind}" for call in self.calls if call.name is not None]
        assert all(call.tokens == call.active for call in self.calls if call.name is not None)
        self.calls.clear()
        return found

    def settings(self, name: str) -> tuple[int, int, int]:
        """``num_splits``, ``num_sm``, ``math_sms`` of a communicator, by its name in the specs."""
        found: tuple[int, int, int] = self.backend.native.settings(self.object(name))  # type: ignore[union-attr]
        return found

    def facts(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.backend.native.inspect(self.object(name))  # type: ignore[union-attr]
        return found

    def object(self, name: str) -> Any:
        return next(comm.reference() for comm in self.backend.communicators if comm.name == name)

    def standing(self, name: str) -> str | None:
        """The name in the specs of what TE's modules find as ``name``."""
        return self.backend.find(base.get_ub(name, False))


@contextmanager
def stock(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """TE's ``initialize_ub`` can run."""
    made.clear()
    patch.setenv("UB_SKIPMC", "1")
    _without_a_device(patch)
    patch.setattr(tex, "device_supports_multicast", lambda: False)
    patch.setattr(tex, "get_stream_priority_range", lambda: (0, -5))
    patch.setattr(tex, "CommOverlapHelper", lambda *groups: "helper")
    patch.setattr(tex, "CommOverlap", Overlap)
    patch.setattr(tex, "CommOverlapP2P", Ring)
    for name, answer in (("is_initialized", True), ("get_rank", 0), ("new_group", "group")):
        patch.setattr(dist, name, lambda *_, answer=answer, **__: answer)
    patch.setattr(dist, "destroy_process_group", lambda group: None)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *shape, device=None, **more: empty(*shape, device=_host(device), **more))
    try:
        yield
    finally:
        base.destroy_ub()


def _host(device: Any) -> Any:
    return "cpu" if str(device).startswith("cuda") else device  # LayerNormMLP's dgrad reduce-scatter asks for CUDA


@contextmanager
def te_world(
    patch: pytest.MonkeyPatch, alternatives: Mapping[str, Any] | None, ub_cfgs: Any = None, **changes: Any
) -> Iterator[World]:
    """TE initialised at ``[CAPACITY, HIDDEN]`` with ``alternatives``."""
    with stock(patch):
        arguments = {
            "capacity": (CAPACITY, HIDDEN), "tp_size": TP, "use_fp8": False, "quantization_modes": None,
            "dtype": torch.bfloat16, "ub_cfgs": ub_cfgs, "bootstrap_backend": "gloo", "with_cublasmp": False,
            "group": Twin(), "board": None,
        }  # fmt: skip
        backend = create_te_backend(*(arguments | changes).values(), alternatives=alternatives)
        world = World(backend)
        names = {id(comm.reference()): comm.name for comm in backend.communicators}
        patch.setattr(tex, "generic_gemm", _recorded_gemm(world.calls, names))
        try:
            yield world
        finally:
            backend.destroy()


def stages(**starts: Mapping[str, OverlapConfig]) -> Policy:
    """``T64={...}, T128={...}``: a policy from stages."""
    from ub_dynamic.policy import Choice

    made = {int(start[1:]): {gemm: Choice(config, "test") for gemm, config in configs.items()}
            for start, configs in starts.items()}  # fmt: skip
    return Policy(tuple(made), tuple(made.values()))


def switch(world: World, **choices: OverlapConfig) -> None:
    world.backend.switch(world.backend.plan(choices))


def installed() -> dict[str, list[str]]:
    """The descriptors that stand on TE's classes."""
    found = {kind.__name__: [name for name, value in vars(kind).items() if isinstance(value, flags._Flag)]
             for kind in (te.Linear, te.LayerNormLinear, te.LayerNormMLP)}  # fmt: skip
    return {name: names for name, names in found.items() if names}

# SPDX-License-Identifier: Apache-2.0
"""Which communicator of Transformer Engine is what: read from the objects that ``initialize_ub`` made.

The objects are the truth, whatever configuration led to them. What they do not store, the use that TE's
modules make of a name decides: ``*_wgrad`` of a column-parallel layer is the bulk reduce-scatter,
``*_fprop`` that is no ring is the pipelined reduce-scatter. Of ``{qkv,fc1}_dgrad`` that is no ring, the
configuration alone tells whether it is pipelined.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ...errors import UBCapacityError, UBShapeError
from ...rules import check_spec
from ...shapes import Collective, CommSpec, Method, Shape
from ..names import LAYERS

Key = tuple[str, Any]  # TE's: (layer name, UserBufferQuantizationMode)
CUBLASMP = "cuBLASMp takes the size of every overlap from its operands: any T that tp divides works as it is"


@dataclass(frozen=True, eq=False)
class Communicator:
    """One communicator object, held weakly. ``spec`` is None, and ``skipped`` says why, if it has no active shape."""

    name: str
    reference: weakref.ref[Any]
    capacity: Shape
    tp: int
    spec: CommSpec | None
    skipped: str | None

    @property
    def fixed(self) -> bool:
        """Whether it works at the capacity shape only."""
        return self.spec is None and self.skipped != CUBLASMP


def communicator_name(key: Key) -> str:
    """``qkv_fprop``, or ``qkv_fprop/fp8`` in another quantization mode than NONE."""
    mode = getattr(key[1], "value", key[1])
    return key[0] if mode in ("none", None) else f"{key[0]}/{mode}"


def read_communicators(
    objects: Mapping[Key, Any],
    capacity: Shape,
    tp: int,
    native: ModuleType | None,
    missing: str,
    pipelined: Collection[str] = (),
) -> tuple[Communicator, ...]:
    """Every communicator of ``objects`` with its :class:`CommSpec`, in TE's order.

    ``capacity`` and ``tp`` are those that they were made with; TE before 2.17 does not tell tp. Without ``native`` all
    of them stay at capacity, for the reason ``missing``. ``pipelined``: names of the dgrads whose reduce-scatter is.
    Raises :class:`UBCapacityError` if TE ran out of regions, which it does not notice itself.
    """
    return tuple(_read(key, comm, capacity, tp, native, missing, pipelined) for key, comm in objects.items())


def _read(
    key: Key,
    comm: Any,
    capacity: Shape,
    tp: int,
    native: ModuleType | None,
    missing: str,
    pipelined: Collection[str],
) -> Communicator:
    name = communicator_name(key)
    spec, skipped = None, missing
    if getattr(comm, "with_cublasmp", bool)():
        skipped = CUBLASMP
    elif native is not None:
        facts = native.inspect(comm)
        if facts["region"] < 0:
            raise UBCapacityError(
                f"{name}: TE registers at most 31 buffers a process and silently leaves out the others; "
                "configure "
                "fewer communicators or quantization modes"
            )
        found = _spec(key[0], name, facts, capacity, tp, name in pipelined)
        spec, skipped = (found, "") if isinstance(found, CommSpec) else (None, found)
    return Communicator(name, weakref.ref(comm), capacity, tp, spec, skipped or None)


def _spec(layer: str, name: str, facts: Mapping[str, Any], capacity: Shape, tp: int, pipelined: bool) -> CommSpec | str:
    """The spec, or why there is none."""
    method, collective = _use(layer, facts, pipelined)
    dtype = getattr(torch, facts["dtype"], None)
    if method == "external":
        return "the external all-gather serves MXFP8 only, whose scales TE gathers for a fixed shape"
    if facts["atomic_gemm"]:
        return "atomic GEMM overlap counts the tiles of a fixed shape"
    if dtype not in (torch.bfloat16, torch.uint8):
        return f"its buffer is {facts['dtype']}, but TE's reduce-scatter kernels compute in bfloat16"
    p2p = facts["is_p2p"]
    spec = CommSpec(
        name=name,
        method=method,
        collective=collective,
        capacity=capacity,
        tp=tp,
        dtype=dtype,
        num_splits=facts["num_splits"],
        num_sm=facts["num_sm"],
        use_ce=facts["use_ce"] if p2p else True,  # the field is meaningless (false) for the other classes
        aggregate=facts["aggregate"] if p2p else False,
    )
    try:
        check_spec(spec)
    except UBShapeError as error:
        return str(error)
    return spec


def _use(layer: str, facts: Mapping[str, Any], pipelined: bool) -> tuple[Method, Collective]:
    layer, _, alternative = layer.partition(" ")  # "fc2_fprop (pipeline)": beside the configured one, for a policy
    default, collective = LAYERS.get(layer, ("bulk", "ag"))
    if facts["is_p2p"]:
        return "ring_exchange", "rs" if facts["reduce_scatter"] else "ag"
    if default == "external":
        return "external", "ag"
    if alternative:
        return ("bulk", "ag") if alternative == "(bulk)" else ("pipeline", "rs")
    if pipelined or default == "pipeline":
        return "pipeline", "rs"
    return "bulk", collective

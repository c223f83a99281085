# SPDX-License-Identifier: Apache-2.0
"""Which communicator of Transformer Engine is what: read from the objects that ``initialize_ub`` made.

The objects are the truth, whatever configuration led to them. What they do not store, the use that TE's
modules make of a name decides: ``*_wgrad`` of a column-parallel layer is the bulk reduce-scatter,
``*_fprop`` that is no ring is the pipelined reduce-scatter, and ``{qkv,fc1}_dgrad`` that is no ring is
pipelined where its buffer is not quantised though its GEMMs are, or where no ``*_wgrad`` stands beside it (TE
itself makes that one always).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ...errors import UBCapacityError, UBShapeError
from ...rules import check_spec
from ...shapes import Collective, CommSpec, Method, Shape
from ..names import DGRAD_REDUCE_SCATTER, LAYERS

Key = tuple[str, Any]  # TE's: (layer name, UserBufferQuantizationMode)
CUBLASMP = "cuBLASMp takes the size of every overlap from its operands, so any T works as it is"


@dataclass(frozen=True, eq=False)
class Communicator:
    """One communicator object, held weakly. ``spec`` is None, and ``skipped`` says why, if it stays at
    capacity.
    """

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
    mode = _mode(key)
    return key[0] if mode in ("none", None) else f"{key[0]}/{mode}"


def _mode(key: Key) -> Any:
    return getattr(key[1], "value", key[1])


def read_communicators(
    objects: Mapping[Key, Any], capacity: Shape, tp: int, native: ModuleType | None, missing: str
) -> tuple[Communicator, ...]:
    """Every communicator of ``objects`` with its :class:`CommSpec`, in TE's order.

    ``capacity`` and ``tp`` are those that they were made with; TE before 2.17 does not tell tp. Without ``native`` all
    of them stay at capacity, for the reason ``missing``. Raises :class:`UBCapacityError` if TE ran out of regions,
    which it does not notice itself.
    """
    return tuple(_read(key, comm, set(objects), capacity, tp, native, missing) for key, comm in objects.items())


def _read(
    key: Key, comm: Any, keys: set[Key], capacity: Shape, tp: int, native: ModuleType | None, missing: str
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
        found = _spec(key, name, facts, keys, capacity, tp)
        spec, skipped = (found, "") if isinstance(found, CommSpec) else (None, found)
    return Communicator(name, weakref.ref(comm), capacity, tp, spec, skipped or None)


def _spec(
    key: Key, name: str, facts: Mapping[str, Any], keys: Iterable[Key], capacity: Shape, tp: int
) -> CommSpec | str:
    """The spec, or why there is none."""
    method, collective = _use(key, facts, keys)
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


def _use(key: Key, facts: Mapping[str, Any], keys: Iterable[Key]) -> tuple[Method, Collective]:
    name, mode = key
    layer, _, alternative = name.partition(" ")  # "fc2_fprop (pipeline)": beside the configured one, for a policy
    default, collective = LAYERS.get(layer, ("bulk", "ag"))
    if facts["is_p2p"]:
        return "ring_exchange", "rs" if facts["reduce_scatter"] else "ag"
    if default == "external":
        return "external", "ag"
    if alternative:
        return ("bulk", "ag") if alternative == "(bulk)" else ("pipeline", "rs")
    wgrad = DGRAD_REDUCE_SCATTER.get(layer)
    quantises = _mode(key) == "fp8"  # a gather's buffer has the GEMM's dtype, a reduce-scatter's BF16
    reduces_dgrad = wgrad is not None and ((wgrad, mode) not in keys or (quantises and facts["dtype"] != "uint8"))
    if reduces_dgrad or (layer.endswith("_fprop") and collective == "rs"):
        return "pipeline", "rs"
    return "bulk", collective

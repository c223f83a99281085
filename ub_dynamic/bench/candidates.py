# SPDX-License-Identifier: Apache-2.0
"""Which configurations are worth measuring for one GEMM: what TE's kernels offer, less what has no effect here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backends.names import LAYERS as NAMES
from ..errors import UBShapeError
from ..overlap import OverlapConfig
from .operations import Gemm

NUM_SM = (2, 4, 8, 16)
NUM_SPLITS = (2, 4)


def candidates(gemm: Gemm, tp: int, hidden: int, backend: str) -> tuple[OverlapConfig, ...]:
    """Every configuration of ``gemm`` to try, apart from the default (:func:`default_of`).

    On the host a communication kernel has no multiprocessors, and a ring has no first GEMM to overlap: the settings
    that change nothing there are left out. A pipelined reduce-scatter of dgrad is left out everywhere: TE computes
    it wrong in BF16 (:mod:`ub_dynamic.backends.te.hazards`).
    """
    found = [OverlapConfig("none")]
    if gemm.backward and gemm.column:
        found += _bulk(backend)
        found.append(OverlapConfig("ring_exchange"))
    elif gemm.backward or gemm.column:
        found.append(OverlapConfig("ring_exchange", aggregate=False))
        if tp % 2 == 0:
            found.append(OverlapConfig("ring_exchange", aggregate=True))
    else:
        found.append(OverlapConfig("ring_exchange"))
        found += _pipeline(hidden, backend)
    return tuple(found)


def _bulk(backend: str) -> list[OverlapConfig]:
    return [OverlapConfig("bulk")] if backend == "host" else [OverlapConfig("bulk", num_sm=count) for count in NUM_SM]


def _pipeline(hidden: int, backend: str) -> list[OverlapConfig]:
    splits = [count for count in NUM_SPLITS if hidden % (8 * count) == 0]
    if backend == "host":
        return [OverlapConfig("pipeline", num_splits=count) for count in splits]
    return [
        OverlapConfig("pipeline", num_sm=sm, num_splits=count, first_gemm=first)
        for first in (False, True)
        for count in splits
        for sm in NUM_SM
    ]


def default_of(gemm: str, ub_cfgs: Mapping[str, Mapping[str, Any]] | None, backend: str) -> OverlapConfig:
    """What ``initialize_ub(ub_cfgs=...)`` configures ``gemm`` to, with the settings that have an effect here."""
    if gemm not in NAMES:
        raise UBShapeError(f"{gemm!r} is no GEMM; known are {', '.join(NAMES)}")
    cfg = (ub_cfgs or {}).get(gemm) or {}
    method = cfg.get("method", NAMES[gemm][0])
    if method == "bulk":
        return OverlapConfig("bulk", num_sm=None if backend == "host" else int(cfg.get("num_sm", 16)))
    if method == "pipeline":
        splits = int(cfg.get("num_splits", 4))
        if backend == "host":
            return OverlapConfig("pipeline", num_splits=splits)
        first = bool(cfg.get("pipeline_rs_overlap_first_gemm", False))
        return OverlapConfig("pipeline", num_sm=int(cfg.get("num_sm", 16)), num_splits=splits, first_gemm=first)
    gathers = NAMES[gemm][1] == "ag" and gemm not in ("qkv_dgrad", "fc1_dgrad")
    return OverlapConfig("ring_exchange", aggregate=bool(cfg.get("aggregate", False)) if gathers else None)

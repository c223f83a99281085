# SPDX-License-Identifier: Apache-2.0
"""Every measurement by name: what runs on the ranks, and the figures that its rows make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import graphs, lengths, op, set_shape, tp_step, tuner
from .report import Report
from .worlds import BackendName, World

Figures = Callable[[Sequence[Mapping[str, Any]]], dict[str, float]]
# TE's own defaults, which a comparison of bits switches off; torch's compiler in the process itself
AS_TRAINED = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1",
    "NVTE_TORCH_COMPILE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


@dataclass(frozen=True)
class Bench:
    """``env``: what the ranks need beside the caller's environment."""

    measure: Callable[[World, Mapping[str, Any], Report], None]
    figures: Figures
    backends: tuple[BackendName, ...] = ("host", "te")
    env: Mapping[str, str] = field(default_factory=dict)


BENCHES: dict[str, Bench] = {
    "set-shape": Bench(set_shape.measure, set_shape.figures),
    "op": Bench(op.measure, op.figures),
    "tp-step": Bench(tp_step.measure, tp_step.figures, env=AS_TRAINED),
    "lengths": Bench(lengths.measure, lengths.figures, env=AS_TRAINED),
    "graphs": Bench(graphs.measure, graphs.figures, backends=("te",)),
    "tune": Bench(tuner.measure, lambda rows: {}),
}

# SPDX-License-Identifier: Apache-2.0
"""The time of a microbatch out of a tuner's table: its GEMMs with their overlaps, as they were measured at some T."""

from __future__ import annotations

import numpy as np

from ..errors import UBUnsupportedError
from ..tuning_table import TuningRow, TuningTable
from .distribution import Integers
from .report import StepTime, Workload


def measured_step_time(table: TuningTable, workload: Workload) -> StepTime:
    """T of microbatches -> microseconds of all GEMMs of ``table``, each with the overlap that the table chose.

    Between measured T on a line; below the smallest one as there, since launches take what they take; above the
    largest one in proportion to T. The table may come from another machine than this one, but not for another ``tp`` or
    H: :class:`UBUnsupportedError`; also for a row without the time of what it chose.
    """
    for name, theirs, ours in (("tp", table.tp, workload.tp), ("hidden", table.hidden, workload.hidden)):
        if ours is not None and theirs != ours:
            raise UBUnsupportedError(f"the tuning table is for {name} = {theirs}, the workload has {name} = {ours}")
    measured: dict[str, dict[int, float]] = {}
    for row in table.rows:
        measured.setdefault(row.gemm, {})[row.tokens] = _chosen_us(row)
    curves = [_curve(times) for times in measured.values()]

    def step_time(tokens: Integers) -> np.ndarray:
        return np.sum([_at(tokens, *curve) for curve in curves], axis=0)

    return step_time


def _chosen_us(row: TuningRow) -> float:
    if not row.candidates:
        raise UBUnsupportedError(
            f"the tuning table is not finished: {row.gemm} at T = {row.tokens} was not measured. Run tune again with "
            f"the same --out, which goes on with what is missing"
        )
    for candidate in row.candidates:
        if candidate.config == row.chosen:
            return candidate.median_us
    raise UBUnsupportedError(f"the tuning table has no time for {row.gemm} at T = {row.tokens} with {row.chosen}")


def _curve(times: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array(sorted(times))
    return tokens, np.array([times[each] for each in tokens.tolist()])


def _at(tokens: Integers, measured: np.ndarray, times: np.ndarray) -> np.ndarray:
    return np.interp(tokens, measured, times) * np.maximum(tokens / measured[-1], 1)

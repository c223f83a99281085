# SPDX-License-Identifier: Apache-2.0
"""What the context-parallel benchmarks make of their rows; the rows themselves need ranks or a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("NVTE_TORCH_COMPILE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    names = ("cp_te", "cp_hierarchical_gpu", "cp_cpu", "_cp", "_one_gpu")
    yield lambda name: import_module(name)
    for name in names:
        sys.modules.pop(name, None)


def test_figures_of_te_with_and_without_patches(load: Any) -> None:
    program: ModuleType = load("cp_te")
    bits = {"what": "bits", "tp": 2, "repeatable": True, "differing": 0, "outside": 0, "flag_right": True, "syncs": 0}
    counts = {"what": "launches", "comm_type": "p2p", "tp": 2, "copies_to_host": 0, "host_waits": 0}
    rows = [
        bits,
        {**bits, "differing": 2},
        {**bits, "repeatable": False, "differing": 4, "outside": 3, "syncs": 1, "flag_right": False},
        {"what": "alternating", "tp": 2, "differing": 1},
        {**counts, "lengths": "full", "arm": "stock", "launches": 102, "copies_to_host": 7},
        {**counts, "lengths": "full", "arm": "stock auto flag", "launches": 120},
        {**counts, "lengths": "full", "arm": "ours", "launches": 70, "host_waits": 2},
        {**counts, "lengths": "padded", "arm": "ours", "launches": 80, "tp": 4},
        {**counts, "lengths": "full", "arm": "ours", "launches": 1, "comm_type": "a2a"},
        {"what": "graph", "tp": 2, "differing": 4},
    ]
    made = program.figures(rows)
    assert (made["launches_cp2"], made["stock_launches_cp2"], made["stock_auto_launches_cp2"]) == (70, 102, 120)
    assert made["launches_padded_cp4"] == 80
    assert made["mismatches"] == 2 + 3 + 1
    assert made["device_syncs"] == 2 + 1
    assert (made["wrong_flags"], made["not_repeatable"], made["comparisons"]) == (1, 1, 3)
    assert (made["graph_captures"], made["graph_mismatches"]) == (1, 4)


def test_figures_of_hierarchical_attention(load: Any) -> None:
    program: ModuleType = load("cp_hierarchical_gpu")
    row = {
        "kernel": "te",
        "comm_type": "a2a+p2p",
        "max_rel_error": 0.01,
        "outside": 0,
        "not_finite": 0,
        "padding": 0,
        "host_waits": 0,
    }
    made = program.figures(
        [
            {**row, "over_te": 0.9},
            {**row, "over_te": 1.04},
            {**row, "over_te": 3.0, "kernel": "torch", "max_rel_error": 0.02, "outside": 5},
            {**row, "over_te": 1.2, "comm_type": "p2p", "padding": 2},
        ]
    )
    assert (made["kernel_time_over_te"], made["kernel_time_over_te_median"]) == (1.04, 0.97)
    assert (made["max_rel_error"], made["outside_tolerance"], made["kernel_time_over_te_p2p"]) == (0.02, 5, 1.2)
    assert made["padding_not_zero"] == 2
    assert "kernel_time_over_te_a2a" not in made


def test_figures_of_cpu_ranks_count_what_is_wrong(load: Any) -> None:
    program: ModuleType = load("cp_cpu")
    row = {"out": 1e-15, "dq": 2e-15, "dk": 0.0, "dv": 0.0, "padding": 0.0}
    made = program.figures([row, {**row, "dv": 1e-9}, {**row, "padding": 1e-30}])
    assert (made["cases"], made["failed"], made["max_abs_error"], made["max_padding"]) == (3, 2, 1e-9, 1e-30)
    cases = list(program.cases(4, 20))
    assert len(cases) > 40
    assert {case.partition.name for case in cases} == {"zigzag", "contiguous", "grid2d"}

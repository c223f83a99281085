# SPDX-License-Identifier: Apache-2.0
"""What the context-parallel benchmarks make of their rows; the rows themselves need ranks or a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ub_dynamic.cp.partition import Partition
from ub_dynamic.testing.attention import Case, dense_attention, random_qkv

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
    bits = {
        "what": "bits",
        "tp": 2,
        "not_repeated": 0,
        "differing": 0,
        "stock_wrong": 0,
        "ours_outside_dense": 0,
        "all_outside_dense": 0,
        "stock_outside_dense": 0,
        "flag_wrong": 0,
        "syncs": 0,
    }
    counts = {"what": "launches", "comm_type": "p2p", "tp": 2, "copies_to_host": 0, "host_waits": 0}
    rows = [
        {**bits, "stock_outside_dense": 7, "all_outside_dense": 6},  # in rows that stock leaves undefined
        {**bits, "differing": 2},
        {
            **bits,
            "not_repeated": 1,
            "differing": 4,
            "ours_outside_dense": 3,
            "all_outside_dense": 3,
            "syncs": 1,
            "flag_wrong": 1,
        },
        {**bits, "stock_wrong": 5, "stock_outside_dense": 5, "differing": 4},
        {"what": "alternating", "tp": 2, "differing": 1, "ours_outside_dense": 20},
        {**counts, "lengths": "full", "arm": "stock", "launches": 102, "copies_to_host": 7},
        {**counts, "lengths": "full", "arm": "stock auto flag", "launches": 120},
        {**counts, "lengths": "full", "arm": "ours", "launches": 70, "host_waits": 2},
        {**counts, "lengths": "padded", "arm": "ours", "launches": 80, "tp": 4},
        {**counts, "lengths": "full", "arm": "ours", "launches": 1, "comm_type": "a2a"},
        {"what": "graph", "tp": 2, "differing": 4, "ours_outside_dense": 1},
    ]
    made = program.figures(rows)
    assert (made["launches_cp2"], made["stock_launches_cp2"], made["stock_auto_launches_cp2"]) == (70, 102, 120)
    assert made["launches_padded_cp4"] == 80
    assert made["mismatches"] == 2 + 3 + 1 + 20
    assert (made["ours_outside_dense"], made["stock_outside_dense"], made["stock_undefined"]) == (23, 12, 2)
    assert made["inherited_outside_dense"] == 6
    assert made["device_syncs"] == 2 + 1
    assert (made["wrong_flags"], made["not_repeatable"], made["comparisons"]) == (1, 1, 4)
    assert (made["graph_captures"], made["graph_mismatches"]) == (1, 5)


def test_figures_of_hierarchical_attention(load: Any) -> None:
    program: ModuleType = load("cp_hierarchical_gpu")
    row = {
        "kernel": "te",
        "comm_type": "a2a+p2p",
        "max_rel_error": 0.01,
        "max_rel_error_dense": 0.005,
        "outside": 0,
        "ours_outside_dense": 0,
        "stock_outside_dense": 0,
        "not_finite": 0,
        "padding": 0,
        "host_waits": 0,
    }
    made = program.figures(
        [
            {**row, "over_te": 0.9},
            {**row, "over_te": 1.04, "stock_outside_dense": 9},
            {**row, "over_te": 3.0, "kernel": "torch", "max_rel_error": 0.02, "outside": 5, "stock_outside_dense": 9},
            {**row, "over_te": 1.2, "comm_type": "p2p", "padding": 2, "ours_outside_dense": 4},
        ]
    )
    assert (made["kernel_time_over_te"], made["kernel_time_over_te_median"]) == (1.04, 0.97)
    assert (made["max_rel_error"], made["outside_tolerance"], made["kernel_time_over_te_p2p"]) == (0.02, 5, 1.2)
    assert (made["ours_outside_dense"], made["stock_outside_dense"], made["stock_undefined"]) == (4, 9, 2)
    assert made["padding_not_zero"] == 2
    assert "kernel_time_over_te_a2a" not in made


def test_dense_reference_is_attention_by_autograd(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program: ModuleType = load("_cp")
    monkeypatch.setattr(program, "BLOCK", 4 * 13 * 5)  # 5 queries of the longest sequence at a time
    case = Case((13, 1, 0, 9), heads=4, groups=2)
    batch = case.batch(2)
    qkv, dout = random_qkv(case, batch.total_tokens)
    inputs = [x.clone().requires_grad_() for x in qkv]
    out = dense_attention(*inputs, batch, causal=True)
    out.backward(dout)
    real = torch.cat(
        [Partition.zigzag().indices(batch, rank)[Partition.zigzag().real_rows(batch, rank)] for rank in (0, 1)]
    )
    made = program.dense_attention(batch, *qkv, dout)
    for found, wanted in zip(made, (out.detach(), *(x.grad for x in inputs)), strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-12, atol=1e-12)
        found[real] = 0
        assert not found.any()


def test_rows_that_are_compared(load: Any) -> None:
    program: ModuleType = load("_cp")
    problem = program.Problem.make((8, 1, 5), 2, 0, torch.device("cpu"), 4, 2)
    # 4, 2 and 4 rows on rank 0: chunks of 2, 1 and 2, of which 4, 1 and 2 hold tokens.
    tensors = [torch.arange(10.0).view(10, 1, 1) for _ in range(4)]
    assert [len(x) for x in problem.tokens(tensors)] == [7, 7, 7, 7]
    assert [len(x) for x in problem.defined(tensors)] == [7, 10, 10, 10]
    # With a ring of 2 dk and dv of the last two sequences are not defined: no token in their last chunks.
    assert [x.flatten().tolist() for x in problem.defined(tensors, ring=2)[2:]] == [[0, 1, 2, 3]] * 2
    assert [len(x) for x in problem.tokens(tensors, ring=2)] == [7, 7, 4, 4]


@pytest.mark.parametrize("stray", [0.0, 2.0])
def test_a_stock_that_is_wrong_is_not_what_ours_is_compared_with(
    load: Any, monkeypatch: pytest.MonkeyPatch, stray: float
) -> None:
    program, common = load("cp_hierarchical_gpu"), load("_cp")
    monkeypatch.setattr(program, "watch", lambda step, repeats: common.Seen(1, 1, 0, 0, 1.0, 1.0, {}))
    world = SimpleNamespace(gather=lambda value: [value])
    problem = common.Problem.make((8, 1), 1, 0, torch.device("cpu"), 4, 2)

    def right(problem: Any) -> list[torch.Tensor]:
        return [x.to(torch.bfloat16) for x in problem.dense]

    def wrong(problem: Any) -> list[torch.Tensor]:
        tensors = right(problem)
        tensors[3][8] += stray
        return tensors

    (ours, theirs) = program.compare(world, problem, wrong, {"te": right, "torch": wrong})
    elements = 2 * 128 if stray else 0
    assert (ours["stock_outside_dense"], theirs["stock_outside_dense"]) == (elements, elements)
    assert (ours["outside"], ours["ours_outside_dense"]) == (0, 0)
    assert max(ours["max_rel_error"], ours["max_rel_error_dense"]) < 0.01
    assert (theirs["outside"], theirs["ours_outside_dense"]) == (elements, elements)
    assert (theirs["max_rel_error"] > 0.1) == bool(stray)


def test_an_error_of_one_token_shows(load: Any) -> None:
    program: ModuleType = load("_cp")
    problem = program.Problem.make((8, 1, 5), 2, 0, torch.device("cpu"), 4, 2)
    right = [x.to(torch.bfloat16) for x in problem.dense]
    assert problem.outside(right) == 0
    for value in (1.0, float("nan"), float("inf")):
        wrong = [x.clone() for x in right]
        wrong[3][4, 0, :5] += value  # dv of the sequence of one token
        assert (problem.outside(wrong), problem.outside(wrong, ring=2)) == (5, 0)
        assert 0.01 < program.relative_error(problem.tokens(wrong), problem.tokens(problem.dense)) <= program.HUGE
        wrong[3][5, 0, :5] += value  # its padding
        assert problem.outside(wrong) == 5


def test_figures_of_cpu_ranks_count_what_is_wrong(load: Any) -> None:
    program: ModuleType = load("cp_cpu")
    row = {"out": 1e-15, "dq": 2e-15, "dk": 0.0, "dv": 0.0, "padding": 0.0}
    made = program.figures([row, {**row, "dv": 1e-9}, {**row, "padding": 1e-30}])
    assert (made["cases"], made["failed"], made["max_abs_error"], made["max_padding"]) == (3, 2, 1e-9, 1e-30)
    cases = list(program.cases(4, 20))
    assert len(cases) > 40
    assert {case.partition.name for case in cases} == {"zigzag", "contiguous", "grid2d"}

# SPDX-License-Identifier: Apache-2.0
"""Plans: every document exactly once, within the budget, in the bins of first-fit decreasing; errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ub_dynamic.errors import UBCapacityError, UBShapeError, UBUnsupportedError
from ub_dynamic.packing_rules import batch_multiple
from ub_dynamic.planning import Plan, Span, plan_fixed_count, plan_microbatches


def first_fit_decreasing(rows: list[int], room: int, most: int) -> list[list[int]]:
    """The textbook loop over all bins."""
    bins: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda i: -rows[i]):
        for members in bins:
            if sum(rows[i] for i in members) + rows[index] <= room and len(members) < most:
                members.append(index)
                break
        else:
            bins.append([index])
    return bins


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[int], int, dict[str, Any]]:
    sizes = {
        "tp": draw(st.sampled_from([1, 2, 4])),
        "cp": draw(st.sampled_from([1, 2, 3])),
        "align": draw(st.sampled_from([1, 8])),
    }
    max_tokens = batch_multiple(**sizes) * draw(st.integers(1, 6)) + draw(st.integers(0, 3))
    lengths = draw(st.lists(st.integers(0, draw(st.sampled_from([3, 20, 150]))), min_size=1, max_size=40))
    assume(any(lengths))
    return lengths, max_tokens, sizes


@settings(max_examples=400, deadline=None)
@given(jobs(), st.sampled_from([None, 2, 3]))
def test_every_token_exactly_once_within_the_budget(
    job: tuple[list[int], int, dict[str, Any]], max_documents: int | None
) -> None:
    lengths, max_tokens, sizes = job
    assume(max_documents is None or all(lengths))
    plan = plan_microbatches(lengths, max_tokens, **sizes, too_long="split", max_documents=max_documents)
    assert plan == plan_microbatches(lengths, max_tokens, **sizes, too_long="split", max_documents=max_documents)
    seen: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(lengths))}
    for microbatch in plan:
        assert microbatch.batch.total_tokens <= max_tokens == microbatch.batch.capacity
        assert microbatch.batch.seqlens[: microbatch.batch.documents] == tuple(
            span.stop - span.start for span in microbatch.spans
        )
        assert list(microbatch.spans) == sorted(microbatch.spans)
        assert len(microbatch.spans) <= (max_documents or len(lengths) + sum(lengths))
        for span in microbatch.spans:
            seen[span.document].append((span.start, span.stop))
    for index, pieces in seen.items():
        ends = [0]
        for start, stop in sorted(pieces):
            assert start == ends[-1]
            ends.append(stop)
        assert pieces and ends[-1] == lengths[index], f"document {index} is not covered exactly once"
    assert plan.tokens == tuple(microbatch.batch.total_tokens for microbatch in plan)
    assert plan.waste == pytest.approx(1 - sum(lengths) / (len(plan) * max_tokens))
    assert plan.padding_fraction == pytest.approx(1 - sum(lengths) / sum(plan.tokens))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(30, 60), st.sampled_from([1, 2, 3, 99]))
def test_same_bins_as_the_textbook(lengths: list[int], max_tokens: int, most: int) -> None:
    plan = plan_microbatches(lengths, max_tokens, max_documents=most)
    bins = first_fit_decreasing(lengths, max_tokens, most)
    assert [list(each.documents) for each in plan] == sorted(sorted(members) for members in bins)


def test_known_plan() -> None:
    plan = plan_microbatches([60, 10, 40, 30, 70, 90], 100)
    assert [each.documents for each in plan] == [(0, 2), (1, 5), (3, 4)]
    assert (plan.waste, plan.padding_fraction, plan.tokens, plan.real_tokens) == (0, 0, (100, 100, 100), 300)
    assert len(plan) == 3 and plan[-1].spans == (Span(3, 0, 30), Span(4, 0, 70)) and len(plan[1:]) == 2
    split = plan_microbatches(torch.tensor([250, 20]), 107, align=10, too_long="split")
    assert [each.spans for each in split] == [
        (Span(0, 0, 100),),
        (Span(0, 100, 200),),
        (Span(0, 200, 250), Span(1, 0, 20)),
    ]
    assert split.tokens == (100, 100, 70)


def test_many_documents() -> None:
    lengths = [(7919 * i) % 1000 + 1 for i in range(50_000)]
    plan = plan_microbatches(lengths, 4096, tp=4, align=8)
    assert sorted(index for each in plan for index in each.documents) == list(range(50_000))
    assert len(plan) == -(-sum(lengths) // 4096) and plan.waste < 1e-3


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 6), st.sampled_from([1, 2]))
def test_fixed_count_keeps_the_order(lengths: list[int], count: int, cp: int) -> None:
    plan = plan_fixed_count(lengths, count, tp=2, cp=cp, align=4)
    assert isinstance(plan, Plan)
    assert [index for each in plan for index in each.documents] == list(range(len(lengths)))
    assert all(len(each.spans) == count for each in plan[:-1]) and 1 <= len(plan[-1].spans) <= count
    assert plan.max_tokens == max(plan.tokens) and all(tokens % (4 * cp) == 0 for tokens in plan.tokens)


@pytest.mark.parametrize(
    ("arguments", "error", "texts"),
    [
        (
            {"lengths": [5, 101, 300], "max_tokens": 100, "cp": 2},
            UBCapacityError,
            ["document 2 has 300 tokens, 300 rows", "max_tokens = 100 holds at most 100", "2 of 3", "'split'"],
        ),
        ({"lengths": [99], "max_tokens": 100, "cp": 3}, UBCapacityError, ["99 tokens, 102 rows", "holds at most 96"]),
        (
            {"lengths": [5], "max_tokens": 7, "tp": 4, "align": 8},
            UBCapacityError,
            ["max_tokens = 7", "T must be a multiple of 8", "next valid value is 8"],
        ),
        ({"lengths": [5], "max_tokens": 0}, UBShapeError, ["max_tokens = 0", "at least 1"]),
        ({"lengths": [5], "max_tokens": 8, "max_documents": 0}, UBShapeError, ["max_documents = 0", "at least 1"]),
        ({"lengths": [5], "max_tokens": 8, "too_long": "crop"}, UBShapeError, ["too_long = 'crop'", "'split'"]),
        ({"lengths": [], "max_tokens": 8}, UBShapeError, ["lengths is empty"]),
        ({"lengths": [0, 0], "max_tokens": 8}, UBShapeError, ["documents [0, 1]", "without any token"]),
        ({"lengths": [5, 0], "max_tokens": 8, "max_documents": 1}, UBShapeError, ["documents [1]", "drop documents"]),
        (
            {"lengths": torch.ones(2, dtype=torch.int32, device="meta"), "max_tokens": 8},
            UBUnsupportedError,
            ["tensor on meta", "would wait"],
        ),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], texts: list[str]) -> None:
    with pytest.raises(error) as caught:
        plan_microbatches(**arguments)
    assert caught.type is error
    for text in texts:
        assert text in str(caught.value)


def test_counts_may_be_numpys() -> None:
    lengths, counts = [30, 7, 9], {"tp": 2, "cp": 2, "align": 4}
    numpys = {name: np.int64(count) for name, count in counts.items()}
    plan = plan_microbatches(lengths, np.int64(64), max_documents=np.int32(2), **numpys)
    assert plan == plan_microbatches(lengths, 64, max_documents=2, **counts) and type(plan.max_tokens) is int
    assert plan_fixed_count(lengths, np.int64(2), **numpys) == plan_fixed_count(lengths, 2, **counts)


def test_fixed_count_errors() -> None:
    with pytest.raises(UBShapeError, match="documents_per_microbatch = 0: it must be an int of at least 1"):
        plan_fixed_count([5], 0)
    with pytest.raises(UBShapeError, match=r"documents \[1\] would make a microbatch without any token"):
        plan_fixed_count([5, 0], 1)


@pytest.mark.parametrize("count", [None, 0, -1, 2.0, True, "8"])
def test_a_budget_that_is_no_count(count: Any) -> None:
    with pytest.raises(UBShapeError, match="max_tokens = .*: it must be an int of at least 1"):
        plan_microbatches([3, 4], count)
    with pytest.raises(UBShapeError, match="documents_per_microbatch = .*: it must be an int of at least 1"):
        plan_fixed_count([3, 4], count)

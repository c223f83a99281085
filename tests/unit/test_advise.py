# SPDX-License-Identifier: Apache-2.0
"""The advisor agrees with the planner, with brute force, with numpy and with a tuner's table."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from advising import command
from hypothesis import given, settings
from hypothesis import strategies as st

from ub_dynamic.advise import Distribution, Report, Workload, advice, advise
from ub_dynamic.advise.buckets import best_borders, padded_to
from ub_dynamic.advise.filling import best_fit, windows
from ub_dynamic.advise.step_time import measured_step_time
from ub_dynamic.backends.names import resolve_specs
from ub_dynamic.errors import UBAlignmentError, UBCapacityError, UBShapeError, UBUnsupportedError
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.planning import plan_fixed_count, plan_microbatches
from ub_dynamic.tuning_table import Candidate, TuningRow, TuningTable

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=60).filter(any)


def run(lengths: Sequence[int], workload: Workload, **options: object) -> Report:
    return advise([np.array(lengths, np.int64)], workload, **options)


def repeated(found: Distribution) -> list[int]:
    return np.repeat(found.values, found.counts).tolist()


# -- against the planner and brute force ---------------------------------------------------------------------


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_fixed_is_what_the_planner_makes(lengths: list[int], documents: int, tp: int, cp: int) -> None:
    groups = [lengths[i : i + documents] for i in range(0, len(lengths), documents)]
    lengths = [length for group in groups if any(group) for length in group]  # the planner refuses empty microbatches
    plan = plan_fixed_count(lengths, documents, tp=tp, cp=cp, align=tp)
    found = run(lengths, Workload(4096, tp, cp, plan="fixed", documents=documents))
    assert repeated(found.tokens) == sorted(tokens // cp for tokens in plan.tokens)
    assert found.real_tokens == plan.real_tokens
    assert found.exact.waste == pytest.approx(plan.padding_fraction)


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_packed_holds_what_the_planner_packs(lengths: list[int], tp: int, cp: int) -> None:
    capacity = 128  # so that some documents are split
    plan = plan_microbatches(
        [length for length in lengths if length], capacity * cp, tp=tp, cp=cp, align=tp, too_long="split"
    )
    found = run(lengths, Workload(capacity, tp, cp))
    assert found.real_tokens == plan.real_tokens == sum(lengths)
    assert found.tokens.largest <= capacity
    assert found.fewest <= len(found.tokens)
    fewer, more = sorted((len(found.tokens), len(plan)))
    assert more <= 11 / 9 * fewer + 1  # best fit beside first fit: the bound of both
    assert found.padded.waste == pytest.approx(1 - sum(lengths) / (cp * capacity * len(found.tokens)))


def slow_best_fit(sizes: Sequence[int], room: int) -> Counter[int]:
    bins: list[int] = []
    for size in sorted(filter(None, sizes), reverse=True):
        fitting = [left for left in bins if left >= size]
        if fitting:
            bins.remove(min(fitting))
        bins.append(min(fitting, default=room) - size)
    return Counter(bins)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(20, 40))
def test_best_fit_is_best_fit(sizes: list[int], room: int) -> None:
    assert best_fit(np.array(sizes), room) == slow_best_fit(sizes, room)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=7), st.integers(1, 4))
def test_borders_are_the_best(pairs: list[tuple[int, int]], buckets: int) -> None:
    tokens = Distribution.of(dict(pairs))
    borders = best_borders(tokens, buckets)
    assert len(borders) <= buckets
    assert borders[-1] == tokens.largest
    every = (
        padded_to(tokens, np.array([*inner, tokens.largest])).total
        for count in range(buckets)
        for inner in itertools.combinations(tokens.values[:-1], count)
    )
    assert padded_to(tokens, np.array(borders)).total == min(every)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[int], share: float) -> None:
    found = Distribution.of(Counter(values))
    assert found.quantile(share) == np.quantile(values, share, method="inverted_cdf")
    assert (found.mean, found.total, found.largest) == (pytest.approx(np.mean(values)), sum(values), max(values))


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=9), st.integers(1, 7))
def test_windows_keep_order_and_size(blocks: list[list[int]], size: int) -> None:
    found = [window.tolist() for window in windows((np.array(block, np.int64) for block in blocks), size)]
    assert list(itertools.chain(*found)) == list(itertools.chain(*blocks))
    assert all(len(window) == size for window in found[:-1])
    assert all(0 < len(window) <= size for window in found)


def test_windows_are_packed_apart() -> None:
    lengths = [60, 60, 40, 40]
    assert len(run(lengths, Workload(100)).tokens) == 2
    assert len(run(lengths, Workload(100, window=2)).tokens) == 3


# -- what is reported ----------------------------------------------------------------------------------------


def test_buffers_are_those_that_are_registered() -> None:
    found = run([1000, 3000], Workload(8192, 4, hidden=1024, plan="fixed", documents=1))
    for shown, tokens in ((found.buffer_bytes, 8192), (found.needed_bytes, 3000)):
        specs = resolve_specs((tokens, 1024), 4, torch.bfloat16)
        assert shown == sum(spec.layout(tokens).capacity_nbytes for spec in specs)
    assert run([5], Workload(8, 4)).buffer_bytes is None  # no H
    assert repr(Workload(np.int64(8), np.int32(4), hidden=np.int64(32))) == repr(Workload(8, 4, hidden=32))
    assert run([5], Workload(8, hidden=1024)).buffer_bytes == 0


def test_tokens_are_rounded_up_by_the_rules() -> None:
    assert run([1001], Workload(8192, 4, hidden=1024)).tokens.largest == 1004
    assert run([1001], Workload(8192, 4, cp=2)).tokens.largest == 504
    assert run([1], Workload(8192, 4, hidden=32)).tokens.largest == 8  # T * H is at least 64 * num_splits


def test_graphs_are_the_shapes_that_occur() -> None:
    found = run([10, 20, 90, 91], Workload(100, plan="fixed", documents=1), buckets=[2])
    assert {each.name: (each.graphs, each.tokens) for each in found.strategies} == {
        "pad to capacity": (1, 400),
        "2 equal buckets": (2, 300),
        "2 best buckets": (2, 222),
        "exact T": (4, 211),
    }
    assert found.exact.time_ratio == pytest.approx(211 / 400)


def test_what_does_not_fit_is_left_out_and_said() -> None:
    found = run([50, 200, 30], Workload(100, plan="fixed", documents=1))
    assert (found.too_long, found.too_large, found.largest_needed) == (1, 1, 200)
    assert (found.real_tokens, len(found.tokens)) == (80, 2)
    text = " ".join(advice(found))
    assert "1 of 3 microbatches do not fit" in text
    assert "the largest needs T = 200" in text
    split = run([50, 200, 30], Workload(100))
    assert (split.real_tokens, split.tokens.total, split.too_large) == (280, 280, 0)
    assert "1 documents have more than the 100 rows" in " ".join(advice(split))


@pytest.mark.parametrize(
    ("lengths", "workload", "says"),
    [
        ([30, 20], Workload(128, plan="fixed", documents=1), "Any 4 microbatches fit into one: 4 documents"),
        ([70, 20] * 9, Workload(128, plan="fixed", documents=1), "could fill as few as 7 microbatches instead of 18"),
        ([60, 60, 40, 40], Workload(100, window=2), "a larger --window than 2 documents"),
        ([64, 64], Workload(64), "Padding to capacity costs 0.0%"),
        ([32, 64], Workload(64, plan="fixed", documents=1), "Set T per microbatch: 25.0% of the tokens"),
        ([20, 63, 64], Workload(64, plan="fixed", documents=1), "2 buckets are enough: T padded to 20, 64"),
        ([20, 63, 64], Workload(64, plan="fixed", documents=1), "with 2 graphs instead of 3."),
        ([32], Workload(64, 2), "a capacity of 32 is enough."),
        ([1], Workload(256, plan="fixed", documents=1), "takes about 0.0039 of its time"),
        ([32], Workload(64, 2, hidden=256), "a capacity of 32 is enough, and saves"),
    ],
)
def test_advice(lengths: list[int], workload: Workload, says: str) -> None:
    assert says in " ".join(advice(run(lengths, workload)))


@pytest.mark.parametrize("lengths", [[32], [32, 64], [8, 16, 24, 32, 40, 48, 56]])
def test_buckets_that_save_no_graph_are_no_advice(lengths: list[int]) -> None:
    found = run(lengths, Workload(64, plan="fixed", documents=1), buckets=(2, 7, 16))
    assert "buckets are enough" not in " ".join(advice(found))


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"capacity": 10, "tp": 4}, UBAlignmentError, "the next valid value is 12"),
        ({"capacity": 0}, UBShapeError, "capacity = 0"),
        ({"capacity": 8, "plan": "best"}, UBShapeError, "it is 'packed' or 'fixed'"),
        ({"capacity": 1, "cp": 2}, UBCapacityError, "the smallest valid T is 2"),
        ({"capacity": 12, "tp": 3, "hidden": 64}, UBShapeError, "tp = 3"),
        ({"capacity": 12, "tp": 2, "hidden": 40}, UBAlignmentError, "the next valid H is 64"),
    ],
)
def test_workloads_that_cannot_be(settings: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Workload(**settings)


def test_no_token_at_all() -> None:
    with pytest.raises(UBShapeError, match="no document has a token"):
        run([0, 0], Workload(8))
    with pytest.raises(UBCapacityError, match="none of 2 microbatches"):
        run([9, 10], Workload(8, plan="fixed", documents=1))


# -- a tuner's table -----------------------------------------------------------------------------------------


def table(*rows: TuningRow) -> TuningTable:
    return TuningTable("a machine", {}, 2, 64, 256, "bfloat16", "cpu-mpi", "", "", rows)


def measured(gemm: str, tokens: int, us: float) -> TuningRow:
    ring = OverlapConfig("ring_exchange")
    other = Candidate(OverlapConfig("none"), 10 * us, 0.0)
    return TuningRow(gemm, tokens, ring, "", (other, Candidate(ring, us, 0.0)))


def test_step_time_is_that_of_the_table(tmp_path: Path) -> None:
    rows = [measured("fc1_fprop", 10, 100.0), measured("fc1_fprop", 30, 200.0), measured("fc2_fprop", 20, 50.0)]
    step_time = measured_step_time(table(*rows), Workload(60, 2))
    assert step_time(np.array([4, 10, 20, 60])).tolist() == [150, 150, 200, 550]
    found = run([4, 20], Workload(60, 2, plan="fixed", documents=1), step_time=step_time)
    assert found.exact.time_ratio == pytest.approx(350 / 1100)
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("4\n20\n")
    path = table(*rows).save(tmp_path / "table.json")
    words = ["--capacity", "60", "--tp", "2", "--plan", "fixed", "--documents", "1", "--table", str(path), "--json"]
    assert json.loads(command(lengths, *words).output)["strategies"][-1]["time_ratio"] == pytest.approx(350 / 1100)


def test_tables_for_something_else_are_refused() -> None:
    with pytest.raises(UBUnsupportedError, match="for tp = 2, the workload has tp = 4"):
        measured_step_time(table(measured("fc1_fprop", 8, 1.0)), Workload(8, 4))
    with pytest.raises(UBUnsupportedError, match="for hidden = 64"):
        measured_step_time(table(measured("fc1_fprop", 8, 1.0)), Workload(8, 2, hidden=128))
    unchosen = TuningRow("fc1_fprop", 8, OverlapConfig("bulk"), "", measured("fc1_fprop", 8, 1.0).candidates)
    with pytest.raises(UBUnsupportedError, match="no time for fc1_fprop at T = 8"):
        measured_step_time(table(unchosen), Workload(8, 2))


def test_a_table_whose_time_was_over_says_how_it_is_finished() -> None:
    unmeasured = TuningRow("fc1_fprop", 8, OverlapConfig("none"), "")
    with pytest.raises(
        UBUnsupportedError, match=r"not finished: fc1_fprop at T = 8 was not measured.*tune again with the same --out"
    ):
        measured_step_time(table(measured("fc1_fprop", 16, 1.0), unmeasured), Workload(8, 2))

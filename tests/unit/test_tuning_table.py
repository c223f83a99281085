# SPDX-License-Identifier: Apache-2.0
"""The file of a tuning table: saved and read again, broken, refused elsewhere, and its policy between measured T."""

from __future__ import annotations

import functools
import json
import logging
import operator
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ub_dynamic.errors import UBShapeError, UBUnsupportedError
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.tuning_table import FORMAT, Candidate, TuningRow, TuningTable, these_versions, this_machine

RING, NONE = OverlapConfig("ring_exchange"), OverlapConfig("none")
PIPELINE = OverlapConfig("pipeline", num_sm=8, num_splits=2, first_gemm=True)


def row(gemm: str, tokens: int, chosen: OverlapConfig) -> TuningRow:
    measured = (Candidate(chosen, 12.5, 0.25), Candidate(NONE, 14.0, 1.5))
    return TuningRow(gemm, tokens, chosen, f"{chosen} at {tokens}", measured, gemm_us=11.0)


TABLE = TuningTable(
    machine="NVIDIA H200",
    versions={"torch": "2.11.0", "transformer_engine": "2.20.2"},
    tp=2,
    hidden=4096,
    ffn=16384,
    dtype="bfloat16",
    mode="2-gpus",
    date="2026-11-30T12:00:00+00:00",
    command="python -m ub_dynamic tune",
    rows=(row("fc2_fprop", 4096, PIPELINE), row("fc2_fprop", 1024, NONE), row("fc1_fprop", 2048, RING)),
)
HERE: dict[str, Any] = {
    "tp": 2,
    "hidden": 4096,
    "dtype": "bfloat16",
    "mode": "2-gpus",
    "machine": "NVIDIA H200",
    "versions": {"torch": "2.13.0", "transformer_engine": "2.10"},
}


def test_saved_and_read_again(tmp_path: Path) -> None:
    path = TABLE.save(tmp_path / "new" / "table.json")
    assert TuningTable.load(path) == TABLE and TuningTable.load(str(path)).rows[0].candidates[0].median_us == 12.5
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]  # nothing half-written is left
    assert json.loads(path.read_text())["format"] == FORMAT


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = TABLE.save(tmp_path / "table.json")
    with pytest.raises(TypeError, match="not JSON serializable"):
        replace(TABLE, date=3j).save(path)  # type: ignore[arg-type]
    assert TuningTable.load(path) == TABLE


def deep(levels: int) -> list[Any]:
    return functools.reduce(lambda inner, _: [inner], range(levels), [])


def change(*keys: Any, value: Any = None) -> Callable[[Any], None]:
    def act(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        if value is None:
            del data[keys[-1]]
        else:
            data[keys[-1]] = value

    return act


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (change("format", value="ub_dynamic tuning table 2"), "format is 'ub_dynamic tuning table 2', not '"),
        (change("format"), "format is None"),
        (change("hidden"), "a tuning table lacks 'hidden'"),
        (
            change("tp", value="2"),
            "a tuning table: tp = '2': it is an int from 1 to 2147483647; the next valid value is 1",
        ),
        (change("tp", value=True), "tp = True: it is an int"),
        (change("tp", value=2**31), "tp = 2147483648: .*; the next valid value is 2147483647"),
        (change("hidden", value=-4), "hidden = -4: .*; the next valid value is 1"),
        (change("ffn", value=16384.0), "ffn = 16384.0: it is an int"),
        (change("dtype", value=3), "dtype = 3: it is a string"),
        (change("mode", value="2 gpus"), "a tuning table: mode = '2 gpus': it is 'cpu-mpi', 'one-gpu-N-ranks' or"),
        (
            change("rows", 1, "gemm", value="fc3"),
            "row 1 .*: a policy names the unknown GEMM 'fc3'; known",
        ),
        (
            change("rows", 2, "chosen", value={"method": "bulk"}),
            "row 2 .*: fc1_fprop has no method 'bulk'; it has",
        ),
        (change("versions", value="2.11"), "versions = '2.11': it is an object, as in {}"),
        (change("versions", "torch", value=2.11), "versions of a tuning table: torch = 2.11: it is a string"),
        (change("rows", value={}), "rows = {}: it is a list"),
        (change("rows", value=[]), "at least one row"),
        (change("rows", value=[3]), "row 0 of a tuning table is 3: it is an object"),
        (change("rows", 1, "chosen"), "row 1 of a tuning table lacks 'chosen'"),
        (change("rows", 1, "chosen", "method"), "row 1 .*: chosen = {}: .* names its method: one of none, bulk"),
        (change("rows", 1, "chosen", value="none"), "row 1 of a tuning table: chosen = 'none': it is an object"),
        (change("rows", 0, "chosen", "method", value="magic"), "row 0 .*: chosen = .*: unknown overlap method 'magic'"),
        (change("rows", 0, "chosen", "method", value=["none"]), "unknown overlap method"),
        (change("rows", 0, "chosen", "sms", value=3), "unknown overlap settings"),
        (change("rows", 0, "chosen", "num_sm", value=deep(450)), "num_sm"),
        (change("rows", 0, "tokens", value=0), "row 0 of a tuning table: tokens = 0: it is an int from 1"),
        (change("rows", 0, "reason", value=[]), "row 0 of a tuning table: reason = .*: it is a string"),
        (change("rows", 0, "candidates", 0, "median_us"), "row 0 of a tuning table lacks 'median_us'"),
        (
            change("rows", 0, "candidates", value=[None]),
            "candidate 0 of row 0 of a tuning table is None: it is an object",
        ),
        (change("rows", 2, "candidates", 1, "config", value=1), "candidate 1 of row 2 .*: config = 1: it is an object"),
        (change("rows", 0, "candidates", 0, "spread_us", value=-1), "spread_us = -1: .* microseconds at least 0"),
        (change("rows", 0, "candidates", 1, "median_us", value=float("nan")), "candidate 1 of row 0 .*median_us = nan"),
        (change("rows", 0, "candidates", 1, "median_us", value=10**400), "candidate 1 of row 0 .*median_us = 1000"),
        (change("rows", 0, "gemm_us", value="fast"), "gemm_us = 'fast': it is a number of microseconds above 0"),
        (change("rows", 0, "gemm_us", value=float("nan")), "row 0 of a tuning table: gemm_us = nan"),
        (
            change("rows", 0, "gemm_us", value=-3.0),
            "gemm_us = -3.0: it is a number of microseconds above 0, as in 12.5",
        ),
        (change("rows", 0, "gemm_us", value=float("inf")), "gemm_us = inf"),
        (change("rows", 0, "gemm_us", value=False), "gemm_us = False"),
        (change("rows", 0, "tokens", value=1024), "two rows for fc2_fprop at T = 1024"),
    ],
)
def test_a_broken_table_says_what_is_wrong(tmp_path: Path, act: Callable[[Any], None], words: str) -> None:
    data = TABLE.to_json()
    act(data)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UBUnsupportedError, match=words) as raised:
        TuningTable.load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"format"', "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[1]", "format is 'list'"),
        (b"[" * 100_000, "nests objects without end"),
        (b'{"tp": ' + 5000 * b"9" + b"}", "is no JSON: .*digits"),
    ],
)
def test_no_table_at_all(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "table.json"
    with pytest.raises(UBUnsupportedError, match="cannot be read.*No such file"):
        TuningTable.load(path)
    path.write_bytes(content)
    with pytest.raises(UBUnsupportedError, match=words):
        TuningTable.load(path)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=4) | st.just("none"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def places(data: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in ``data``."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*before, key)
        yield from places(value, (*before, key))


@given(st.sampled_from(list(places(TABLE.to_json()))), JSON)
@example(("machine",), "x" * 10**6)
@example(("rows", 2, "candidates", 1, "config", "method"), [10**400] * 9)
@example(("rows", 2, "candidates", 1, "config", "num_sm"), [[10**400] * 9] * 9)
def test_any_value_in_any_place_gives_a_table_or_the_error(place: tuple[Any, ...], value: Any) -> None:
    data = TABLE.to_json()
    owner = functools.reduce(operator.getitem, place[:-1], data)
    owner[place[-1]] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.json")
        path.write_text(json.dumps(data))
        try:
            table = TuningTable.load(path)
        except UBUnsupportedError as error:
            refusal = str(error)
        else:
            refusal = ""
        if refusal:
            assert str(path) in refusal and len(refusal) < 1000
            return
        policy = table.policy()  # what is read can be used, and written again
        assert policy.digest() and policy.choices(1)
        assert TuningTable.load(table.save(path)) == table


class TestElsewhere:
    def test_it_fits_where_it_was_measured(self) -> None:
        TABLE.check_fits(**HERE)
        TABLE.check_fits(**{**HERE, "mode": None, "versions": {}})
        here = replace(TABLE, machine=this_machine(), versions=these_versions())
        here.check_fits(tp=2, hidden=4096, dtype="bfloat16")

    @pytest.mark.parametrize(
        ("other", "words"),
        [
            ({"machine": "NVIDIA B200"}, "machine is NVIDIA H200, here NVIDIA B200"),
            ({"tp": 4}, "tp is 2, here 4"),
            ({"hidden": 8192}, "hidden is 4096, here 8192"),
            ({"dtype": "float32"}, "dtype is bfloat16, here float32"),
            ({"mode": "cpu-mpi"}, "mode is 2-gpus, here cpu-mpi"),
            ({"versions": {"torch": "3.0"}}, "torch is 2.11.0, here 3.0"),
            ({"tp": 8, "hidden": 1024}, "tp is 2, here 8; hidden is 4096, here 1024"),
        ],
    )
    def test_elsewhere_it_is_refused_unless_forced(
        self,
        other: dict[str, Any],
        words: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with pytest.raises(UBUnsupportedError) as raised:
            TABLE.check_fits(**{**HERE, **other})
        assert f"measured elsewhere: {words}. Tune here" in str(raised.value)
        assert "load(path, force=True)" in str(raised.value) and "UB_DYNAMIC_FORCE_TABLE=1" in str(raised.value)
        with caplog.at_level(logging.WARNING, "ub_dynamic"):
            TuningTable.load(TABLE.save(tmp_path / "table.json"), force=True).check_fits(**{**HERE, **other})
            monkeypatch.setenv("UB_DYNAMIC_FORCE_TABLE", "1")
            TABLE.check_fits(**{**HERE, **other})
        assert [words in record.message for record in caplog.records] == [True, True]


class TestPolicy:
    def test_the_nearer_measured_t_in_log_scale(self) -> None:
        policy = TABLE.policy()
        chosen = {tokens: policy.choices(tokens)["fc2_fprop"].config for tokens in (1, 1024, 2048, 2049, 4096, 99999)}
        assert chosen == {1: NONE, 1024: NONE, 2048: NONE, 2049: PIPELINE, 4096: PIPELINE, 99999: PIPELINE}
        assert policy.choices(8)["fc1_fprop"] == policy.choices(9000)["fc1_fprop"] == (RING, f"{RING} at 2048")
        assert policy.choices(2049)["fc2_fprop"].reason == f"{PIPELINE} at 4096"

    @given(st.lists(st.integers(1, 5000), min_size=1, max_size=8, unique=True), st.integers(1, 6000))
    def test_every_t(self, measured: list[int], tokens: int) -> None:
        table = replace(TABLE, rows=tuple(replace(TABLE.rows[0], tokens=each, reason=str(each)) for each in measured))
        taken = int(table.policy().choices(tokens)["fc2_fprop"].reason)
        for other in measured:  # max(a/b, b/a), compared in whole numbers
            ours, theirs = (max(tokens, taken), min(tokens, taken)), (max(tokens, other), min(tokens, other))
            assert ours[0] * theirs[1] <= theirs[0] * ours[1]

    def test_rows(self) -> None:
        with pytest.raises(UBShapeError, match="at least one row"):
            replace(TABLE, rows=())

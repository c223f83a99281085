# SPDX-License-Identifier: Apache-2.0
"""Lengths are read from lines, JSON and Parquet, and a wrong line is named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from advising import command

from ub_dynamic.advise import read_lengths
from ub_dynamic.errors import UBShapeError


def read(path: Path, *options: str) -> list[int]:
    return np.concatenate(list(read_lengths(path, *options))).tolist()


def test_readers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("3\n\n 0 \n500000\n7")
    (tmp_path / "a.jsonl").write_text('{"length": 3, "x": "\\n"}\n\n{"length": [1, 2]}\n')
    assert read(tmp_path / "a.txt") == [3, 0, 500000, 7]
    assert read(tmp_path / "a.jsonl") == [3, 2]


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow: pip install 'ub_dynamic[advise]'")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    columns = {
        "length": pa.array([3, 5, 8], pa.int32()),
        "input_ids": [[1, 2], [], [4]],
        "hole": pa.array([1, None, 2]),
        "below": [1, 2, -2],
        "text": ["a", "b", "c"],
    }
    parquet.write_table(pa.table(columns), path)
    assert read(path) == [3, 5, 8]
    assert read(path, "input_ids") == [2, 0, 1]
    for column, says in [
        ("hole", "row 1: there is no value in column 'hole'"),
        ("below", "row 2: -2 is no length"),
        ("text", "column 'text' is string"),
        ("gone", "no column 'gone'; it has length, input_ids"),
    ]:
        with pytest.raises(UBShapeError, match=says):
            read(path, column)
    path.write_text("3\n4\n")
    with pytest.raises(UBShapeError, match="is no Parquet file"):
        read(path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "a.PARQUET"
    path.write_bytes(b"PAR1")
    result = command(path, "--capacity", 64)
    assert result.exit_code == 2
    assert "pip install 'ub_dynamic[advise]'" in result.output


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "3\n4\nfive\n6\n", "a.txt, line 3: 'five' is no length, an integer of at least 0"),
        ("a.txt", "3\n1_0\n", "line 2: '1_0' is no length"),
        ("a.txt", "3\n²\n", "line 2: '²' is no length"),
        ("a.jsonl", "[" * 100_000, "...' is no length, a JSON object whose field"),
        ("a.txt", "3\n\n-4\n", "line 3: -4 is no length"),
        ("a.txt", "1.5\n", "line 1: '1.5' is no length"),
        ("a.txt", "9" * 30 + "\n", "a length is at least 0 and at most 2^40"),
        ("a.txt", "\n", "holds no length"),
        ("a.txt", "", "holds no length"),
        ("a.jsonl", '{"length": 3}\n{"size": 4, "id": 1}\n', "line 2: there is no field 'length'; it has size, id"),
        ("a.jsonl", '{"length": 3}\n{"length": "4"}\n', 'line 2: \'{"length": "4"}\' is no length'),
        ("a.jsonl", '{"length": true}\n', "line 1"),
        ("a.jsonl", '{"length": 3},{"length": 4}\n', "line 1"),
        ("a.jsonl", '{"length": 3\n', "line 1"),
        ("a.jsonl", "17\n", "line 1: '17' is no length, a JSON object whose field 'length' is an integer"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UBShapeError) as raised:
        read(tmp_path / name)
    assert says in str(raised.value)


def test_lines_are_counted_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ub_dynamic.advise.reading._BLOCK_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_text("11\n" * 20 + "x\n")
    done: list[int] = []
    with pytest.raises(UBShapeError, match="line 21"):
        for _ in read_lengths(path, on_progress=done.append):
            pass
    assert len(done) > 3
    assert done == sorted(done)

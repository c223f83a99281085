# SPDX-License-Identifier: Apache-2.0
"""Tables of the command line are readable at any width: no cell is broken, and nothing is left out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ub_dynamic.bench.start import Ended
from ub_dynamic.cli import measuring
from ub_dynamic.cli.app import app
from ub_dynamic.cli.tables import show_table

COLUMNS = ("GEMM", "T", "chosen", "over default", "why")
ROWS = [
    ("fc1_fprop", "4096", "ring_exchange aggregate=True", "0.913", "0.913 +- 0.002 times the time of the default"),
    ("fc2_fprop", "16384", "none", "", "[not] measured: the time was over"),
]


def shown(width: int, shrinks: str | None = "why") -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    show_table(console, COLUMNS, ROWS, left=("GEMM", "chosen"), shrinks=shrinks, title="A title")
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [42, 50, 60, 79, 80, 100, 120, 200])
@pytest.mark.parametrize("shrinks", ["why", None])
def test_no_cell_is_broken(width: int, shrinks: str | None) -> None:
    lines = shown(width, shrinks)
    assert lines[0].strip() == "A title"
    assert max(map(len, lines)) <= width
    for row in ROWS:
        for column, cell in zip(COLUMNS, row, strict=True):
            if column != "why":
                assert any(cell in line for line in lines), (cell, lines)
    assert all(any(column in line for line in lines) for column in COLUMNS)


def test_wide_is_a_table_and_narrow_is_a_list() -> None:
    wide, narrow = shown(200), shown(60)
    assert [line.split()[:2] for line in wide[3:]] == [["fc1_fprop", "4096"], ["fc2_fprop", "16384"]]
    assert [line.split()[0] for line in narrow[1:6]] == ["GEMM", "T", "chosen", "over", "why"]
    assert ROWS[1][4] in narrow[-1] or ROWS[1][4] in narrow[-2]  # brackets are no markup, and the whole reason is there


@pytest.mark.parametrize("width", [40, 200])
@pytest.mark.parametrize("row", [["a"], ["a", "b", "c"]])
def test_a_row_has_a_cell_for_each_column(width: int, row: list[str]) -> None:
    with pytest.raises(ValueError, match="zip"):
        show_table(Console(width=width), ["one", "two"], [row])


def test_only_the_column_that_shrinks_is_cut() -> None:
    lines = shown(95)
    assert lines[3].split()[:2] == ["fc1_fprop", "4096"] and lines[3].rstrip().endswith("…")
    assert "why" in shown(95, shrinks=None)[5]


ROW = {"gemm": "fc1_fprop", "tokens": 4096, "best_peer": "async_tp", **{f"arm{i}_us": 123.456 + i for i in range(9)}}


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_bench_advise_and_layout(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "tokens": 8192, "best_peer": "cublasmp", **{f"arm{i}_us": 1e6 + i for i in range(9)}}]

    def run(*_: Any, **__: Any) -> Ended:
        return Ended(0, tuple({"row": row} for row in rows), "")

    monkeypatch.setattr(measuring, "run", run)
    monkeypatch.setattr(measuring, "mode_of", lambda *_: "cpu-mpi")
    monkeypatch.setattr("ub_dynamic.bench.asked.mode_of", lambda *_: "cpu-mpi")
    lengths = tmp_path / "lengths"
    lengths.write_text("".join(f"{100 + 37 * i % 5000}\n" for i in range(500)))
    layout = [
        "--method",
        "ring_exchange",
        "--collective",
        "rs",
        "--capacity",
        "8192x4096",
        "--tokens",
        "3072",
        "--tp",
        "4",
    ]
    for words, cells in (
        (("bench", "op"), ["async_tp", "cublasmp", "123.5", "1,000,008"]),
        (("advise", str(lengths), "--capacity", "8192"), ["pad to capacity", "16 best buckets", "8,192"]),
        (("layout", *layout), ["3,145,728"]),
    ):
        result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, list(words))
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert all(any(cell in line for line in lines) for cell in cells), result.output

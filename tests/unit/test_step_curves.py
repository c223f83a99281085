# SPDX-License-Identifier: Apache-2.0
"""Step time against T is drawn from what tp-step writes: its arms, a panel for each tp, and the proportional line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ub_dynamic.bench import step_curves
from ub_dynamic.bench.report import Report
from ub_dynamic.bench.tp_step import one_length
from ub_dynamic.testing.results import write_result

ROOT = Path(__file__).resolve().parents[2]
CAPACITY = 1024


class Alone:
    """A world of one rank."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Steps:
    """A step takes a microsecond a token, padded or not overlapped ones as long as they would."""

    block_ms = 1.0

    def block(self, arm: str, tokens: int, steps: int) -> float:
        return {"pad": CAPACITY, "none": 2 * tokens}.get(arm, tokens) / 1000

    def epoch(self, arm: str, tokens: Any) -> float:
        raise NotImplementedError

    def close(self) -> None: ...


def rows_of(tp: int) -> list[dict[str, Any]]:
    """As tp_step itself makes them."""
    sizes = {"capacity": CAPACITY, "hidden": 64}
    rows: list[dict[str, Any]] = []
    report = Report(lambda event: rows.append(dict(event["row"])))
    for tokens in (1024, 256, 512):
        row = one_length(Alone(), lambda *_: Steps(), sizes, tokens, ("dynamic", "exact", "pad", "none"), 0.0)
        report.row({"kind": "step", "tp": tp, **row})
    return rows


def lines_of(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, list[tuple[float, float]]]]:
    """The lines of every panel by label, as (T, milliseconds)."""
    drawn = []

    def keep(figure: Any, path: Path, **_: Any) -> None:
        for axes in figure.axes:
            labelled = zip(*axes.get_legend_handles_labels(), strict=True)
            found = {label: getattr(handle, "lines", [handle])[0] for handle, label in labelled}
            drawn.append({label: [(float(x), float(y)) for x, y in line.get_xydata()] for label, line in found.items()})

    monkeypatch.setattr(step_curves.Figure, "savefig", keep)
    step_curves.draw(rows, "title", Path("unused.svg"))
    return drawn


def test_a_row_keeps_every_block() -> None:
    for row in rows_of(2):
        assert row["dynamic_blocks_ms"] == [row["dynamic_ms"]] * row["blocks"]
        assert len(row["dynamic_beside_pad_blocks_ms"]) == len(row["pad_blocks_ms"])


def test_every_arm_is_a_line_in_a_panel_of_its_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    times, times_of_4, ratios, _ = lines_of([*rows_of(2), *rows_of(4)], monkeypatch)
    assert times["dynamic"] == times["buffers made for exactly T"] == [(256, 0.256), (512, 0.512), (1024, 1.024)]
    assert times["padded to capacity"] == [(256, 1.024), (512, 1.024), (1024, 1.024)]
    assert times["without overlap"] == [(256, 0.512), (512, 1.024), (1024, 2.048)]
    assert times["in proportion to T"] == [(0, 0), (CAPACITY, 1.024)]
    assert times_of_4 == times
    assert ratios["dynamic / exact"] == [(256, 1), (512, 1), (1024, 1)]
    assert ratios["dynamic / none"] == [(256, 0.5), (512, 0.5), (1024, 0.5)]


def test_rows_without_a_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row of kind 'step'"):
        step_curves.draw([{"kind": "lengths", "dynamic_ms": 1.0}], "title", tmp_path / "steps.svg")


def test_the_program_draws_a_result_file(tmp_path: Path) -> None:
    path = write_result("steps", {}, [*rows_of(2), *rows_of(4)], mode="one-gpu-4-ranks", folder=tmp_path)
    outs = [tmp_path / "steps.svg", tmp_path / "steps.png"]
    words = [sys.executable, str(ROOT / "benchmarks" / "draw_steps.py"), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([*words, "--out", *map(str, outs)], **options)
    assert done.returncode == 0, done.stderr
    text = outs[0].read_text()
    assert all(words in text for words in ("tp 2, MLP, H 64", "tp 4, MLP, H 64", "ranks that share one GPU"))
    assert "in proportion to T" in text and json.loads(path.read_text())["date"][:10] in text
    assert outs[1].read_bytes().startswith(b"\x89PNG")
    refused = subprocess.run(words, **options)
    assert refused.returncode == 2 and "--out is needed" in refused.stderr

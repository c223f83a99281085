# SPDX-License-Identifier: Apache-2.0
"""benchmarks/megatron_gpu.py without a GPU: its arguments, and the figures that it makes of rows."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("megatron_gpu")
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpt", "packed", "megatron_gpu", "_one_gpu")]:
        del sys.modules[name]


def row(mode: str, step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "part": "equal",
        "recompute": "no",
        "token_ratio": 0.6,
        "loss": 2.0,
        "grad_norm": 1.0,
        "seconds": 1.0,
        "tokens": 10,
        "overlaps": 90,
    }
    return {**values, "mode": mode, "step": step, **changes}


def test_arguments_and_names(program: ModuleType) -> None:
    options = program.parse([])
    assert (program.name_of(options), options.tp, options.steps) == ("megatron_tp2", [2], 50)
    options = program.parse(["--pp", "2"])
    assert (program.name_of(options), options.tp) == ("megatron_tp2pp2", [4])
    settings = program.settings_of(options, "full")
    assert (settings.tp, settings.pp, settings.recompute, settings.hidden) == (2, 2, "full", 1024)
    timed = program.timed_settings_of(options)
    assert (timed.hidden, timed.max_document, timed.pp, timed.layers) == (4096, 2048, 2, settings.layers)
    with pytest.raises(Exception, match="the next valid value is 6"):
        program.parse(["--pp", "2", "--layers", "5"])


def test_figures_take_the_worst_of_all_kinds_of_recomputation(program: ModuleType) -> None:
    rows = []
    for recompute, off in (("no", 0.01), ("full", 0.03)):
        for step in range(3):
            rows += [
                row("dynamic", step, recompute=recompute, loss=2.0 + off, seconds=9.0),
                row("pad", step, recompute=recompute, loss=2.0 + off / 2),
                row("none", step, recompute=recompute, grad_norm=1.25, overlaps=0),
            ]
    for mode, seconds, tokens in (("dynamic", 0.61, 6), ("pad", 1.0, 10)):
        timed = {"part": "time", "loss": 5.0, "overlaps": 60}
        rows += [row(mode, step, seconds=seconds, tokens=tokens, **timed) for step in range(1, 3)]
        rows.insert(-2, row(mode, 0, seconds=7.0, tokens=10, **timed))  # the first step is left out
    figures = program.figures(rows)
    assert figures["iterations"] == 3
    assert figures["overlaps_least"] == 60
    assert figures["max_loss_diff"] == pytest.approx(0.03)
    assert figures["max_loss_diff_to_pad"] == pytest.approx(0.015)
    assert figures["max_grad_norm_rel_diff"] == pytest.approx(0.2)
    assert figures["dynamic_over_pad_time"] == pytest.approx(0.61)
    assert figures["token_ratio"] == 0.6
    assert figures["dynamic_over_pad_excess"] == pytest.approx(0.01)


def test_a_start_that_was_ended_gives_no_figures(program: ModuleType) -> None:
    assert program.figures([row("dynamic", 0), row("dynamic", 1), row("pad", 0)]) == {}
    assert program.figures([]) == {}

# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on ranks that share a GPU: the benchmarks' own comparisons, judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.te, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


def measured(program: str, name: str, folder: Path) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, f"benchmarks/{program}.py", "--out", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return result


@pytest.fixture(scope="module")
def te(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured("cp_te", "cp_te", tmp_path_factory.mktemp("cp_te"))


@pytest.fixture(scope="module")
def hierarchical(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured("cp_hierarchical_gpu", "cp_hierarchical", tmp_path_factory.mktemp("cp_hierarchical"))


def test_results_are_those_of_stock(te: dict[str, Any]) -> None:
    figures = te["figures"]
    assert figures["comparisons"] == 2 * 3 + 2 * 4
    assert (figures["mismatches"], figures["wrong_flags"], figures["ours_outside_dense"]) == (0, 0, 0)


def test_patches_apply_in_full(te: dict[str, Any]) -> None:
    assert all(row["unpatched"] == 0 for row in te["rows"] if row["what"] == "bits")


def test_fewer_launches(te: dict[str, Any]) -> None:
    figures = te["figures"]
    for cp in (2, 4):
        for kind in ("", "_padded"):
            assert figures[f"launches{kind}_cp{cp}"] < 0.85 * figures[f"stock_launches{kind}_cp{cp}"]


def test_nothing_waits_for_the_device(te: dict[str, Any]) -> None:
    assert te["figures"]["device_syncs"] == 0


def test_captured_graphs(te: dict[str, Any]) -> None:
    assert te["figures"]["graph_captures"] == 4
    assert te["figures"]["graph_mismatches"] == 0


def test_hierarchical_attention_is_that_of_te(hierarchical: dict[str, Any]) -> None:
    figures = hierarchical["figures"]
    assert (figures["outside_tolerance"], figures["not_finite"], figures["host_waits"]) == (0, 0, 0)
    assert (figures["padding_not_zero"], figures["ours_outside_dense"]) == (0, 0)
    assert figures["max_rel_error"] < 0.02

# SPDX-License-Identifier: Apache-2.0
"""examples/attnres_pipeline.py, started as a user starts it, but tiny: it learns, and the cache changes no loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ub_dynamic.testing.launch import run_ranks

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "attnres_pipeline.py"
TINY = [
    "--steps",
    "2",
    "--microbatches",
    "4",
    "--max-document",
    "96",
    "--hidden",
    "32",
    "--sublayers",
    "8",
    "--device",
    "cpu",
]

pytestmark = pytest.mark.mpi


def test_two_stages_of_two_tensor_parallel_ranks() -> None:
    flags = [*TINY, "--vpp", "2", "--tp", "2", "--documents", "4"]
    result = run_ranks(PROGRAM, 4, flags, launcher="torchrun", timeout=120, env={"COLUMNS": "160"}).check()
    steps = re.findall(r"T from +(\d+) to +(\d+)  loss plain ([\d.]+), cached ([\d.]+)", result.stdout)
    assert len(steps) == 2, result.stdout
    for shortest, longest, plain, cached in steps:
        assert int(shortest) < int(longest)
        assert float(plain) == pytest.approx(float(cached), abs=1e-4)
    assert float(steps[1][2]) < float(steps[0][2])
    assert 4.0 < float(steps[0][2]) < 7.0  # near the entropy of 257 equally likely bytes: of all TP ranks' rows
    row = next(line for line in result.stdout.splitlines() if "blocks sent a microbatch" in line)
    assert re.findall(r"\d+ \(\d+\)", row) == ["4 (4)", "2 (2)"]
    assert not result.leftover

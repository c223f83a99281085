# SPDX-License-Identifier: Apache-2.0
"""examples/cp_thd_attention.py, started as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.mpi
@pytest.mark.parametrize("flags", [[], ["--partition", "contiguous", "--inner", "4", "--lengths", "64", "33"]])
def test_example_on_four_processes(flags: list[str]) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "examples/cp_thd_attention.py", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest error of out and gradients" in done.stdout
    assert "choose_cp_comm: ub_dynamic" in done.stdout or "choose_cp_comm: te" in done.stdout

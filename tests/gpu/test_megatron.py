# SPDX-License-Identifier: Apache-2.0
"""examples/megatron_gpt.py on a real GPU: several ranks share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--steps", "4", "--hidden", "256", "--layers", "4", "--heads", "8", "--max-document", "512", "--no-plot")
PATIENCE = float(os.environ.get("UB_DYNAMIC_TEST_PATIENCE", "1"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.te,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core"),
]


def start(ranks: int, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(ROOT / "examples" / "megatron_gpt.py"), *SMALL, "--out", str(folder), *flags]
    command = [sys.executable, "-m", "ub_dynamic", "one-gpu", "-n", str(ranks), "--mps", "--", *program]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300 * PATIENCE, env=env, cwd=ROOT, check=False
    )


def summary(ranks: int, folder: Path, *flags: str) -> dict[str, Any]:
    done = start(ranks, folder, *flags)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads((folder / "summary.json").read_text())


def test_stock_ends_in_the_error_of_te(tmp_path: Path) -> None:
    done = start(2, tmp_path, "--mode", "stock")
    assert done.returncode != 0
    said = done.stdout + done.stderr  # the launcher passes on what the ranks say as its own output
    assert "megatron_gpt.py, rank" in said, said[-3000:]
    assert "numel() == " in said or "input_size" in said, said[-3000:]


@pytest.mark.parametrize(
    "flags",
    [
        ("--tp", "2"),
        ("--tp", "2", "--recompute", "full"),
        ("--tp", "2", "--recompute", "selective"),
        ("--tp", "2", "--pp", "2"),
        ("--tp", "2", "--pp", "2", "--vpp", "2"),
        ("--tp", "2", "--bucket", "512"),
    ],
    ids=" ".join,
)
def test_dynamic_is_what_no_overlap_is(tmp_path: Path, flags: tuple[str, ...]) -> None:
    figures = summary(4 if "--pp" in flags else 2, tmp_path, "--mode", "dynamic", "pad", "none", *flags)["figures"]
    assert figures["iterations"] == 4
    assert figures["max_loss_diff"] < 1e-2
    assert figures["max_loss_diff_to_pad"] < 1e-2
    assert figures["max_grad_norm_rel_diff"] < 2e-2

# SPDX-License-Identifier: Apache-2.0
"""What the pipeline benchmarks share: they start themselves on the ranks of a pipeline with torchrun, over gloo."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import _host_ranks

from ub_dynamic.testing.launch import run_ranks


def ask(program: str, pp: int, arguments: list[str], timeout: float) -> Any:
    """Run ``program`` on ``pp`` ranks and return what its first rank answered (``_host_ranks.answer``)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        environment = {_host_ranks._ANSWER: str(file)}
        run_ranks(program, pp, arguments, env=environment, timeout=timeout, launcher="torchrun").check()
        return json.loads(file.read_text())

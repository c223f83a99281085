# SPDX-License-Identifier: Apache-2.0
"""What the host benchmarks share: the program starts itself on its ranks, and the first rank hands back JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ub_dynamic.groups import Group, tensor_parallel_group
from ub_dynamic.testing.launch import run_ranks

_ANSWER = "UB_DYNAMIC_BENCHMARK_ANSWER"  # set in the ranks only: the file for the first rank's answer


def is_rank() -> bool:
    """Whether this process is one of the ranks, not the program that the user started."""
    return _ANSWER in os.environ


def answer(tp: int, measure: Callable[[Group], Any]) -> None:
    """On a rank: run ``measure`` on the TP group and hand the first rank's value back."""
    group = tensor_parallel_group(tp)
    value = measure(group)
    if group.rank == 0:
        Path(os.environ[_ANSWER]).write_text(json.dumps(value))
    group.barrier("ending the benchmark")


def ask(program: str, tp: int, arguments: list[str], timeout: float) -> Any:
    """Run ``program`` on ``tp`` ranks with ``arguments`` and return what they answered."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        run_ranks(program, tp, [*arguments, "--tp", str(tp)], env={_ANSWER: str(file)}, timeout=timeout).check()
        return json.loads(file.read_text())

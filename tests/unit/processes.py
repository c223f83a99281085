# SPDX-License-Identifier: Apache-2.0
"""Processes that tests start on "one GPU", which need none, and whether they are still there."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

from ub_dynamic.testing.one_gpu import OneGpu, run


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def lines(command: list[str], options: OneGpu) -> tuple[int, int | None, list[str]]:
    output = io.BytesIO()
    outcome = run(command, options, output)
    return outcome.returncode, outcome.failed_rank, sorted(output.getvalue().decode().splitlines())


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Not gone and no zombie, whose command line is empty."""
    try:
        return bool(Path("/proc", str(pid), "cmdline").read_bytes())
    except OSError:
        return False

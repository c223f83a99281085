# SPDX-License-Identifier: Apache-2.0
"""Find and end every process of a run, whatever sessions and groups it made: all carry one environment
variable.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

RUN_ID = "UB_DYNAMIC_RUN_ID"


def new_mark() -> dict[str, str]:
    """The environment that marks the processes of one new run."""
    return {RUN_ID: uuid.uuid4().hex}


def marked_pids(mark: dict[str, str]) -> tuple[int, ...]:
    """Every live process that was started with ``mark`` in its environment (Linux: reads ``/proc``)."""
    wanted = f"{RUN_ID}={mark[RUN_ID]}".encode()
    return tuple(int(name) for name in os.listdir("/proc") if name.isdigit() and wanted in _environ(name))


def signal_marked(mark: dict[str, str], number: signal.Signals) -> int:
    """Send a signal to every process of the run; how many there were."""
    pids = marked_pids(mark)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return len(pids)


def kill_marked(mark: dict[str, str], first: signal.Signals = signal.SIGTERM, grace_s: float = 3.0) -> None:
    """Ask every process of the run to end with ``first``, and kill what is left after ``grace_s`` seconds."""
    deadline = time.monotonic() + grace_s
    signal_marked(mark, first)
    while marked_pids(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    # Again, for what was being started in the meantime; a killed process on a GPU needs a moment to go.
    deadline = time.monotonic() + 10.0
    while signal_marked(mark, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.05)


def _environ(pid: str) -> bytes:
    """The environment a process was started with; empty for one that is gone, a zombie, or another user's."""
    try:
        return Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return b""

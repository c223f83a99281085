# SPDX-License-Identifier: Apache-2.0
"""Find and end every process of a run, whatever sessions and groups it made: all carry one environment
variable. What they have in shared memory goes with them: an MPI that is killed leaves its files behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

RUN_ID = "UB_DYNAMIC_RUN_ID"
_SHARED = re.compile(r"(/dev/shm/\S+)$", re.MULTILINE)


def new_mark() -> dict[str, str]:
    """The environment that marks the processes of one new run; inside of another run, as a part of that one too."""
    return {RUN_ID: ".".join(filter(None, [os.environ.get(RUN_ID), uuid.uuid4().hex]))}


def marked_pids(mark: dict[str, str]) -> tuple[int, ...]:
    """Every live process that was started with ``mark`` in its environment (Linux: reads ``/proc``)."""
    wanted = f"{RUN_ID}={mark[RUN_ID]}".encode()
    return tuple(int(name) for name in os.listdir("/proc") if name.isdigit() and wanted in _environ(name))


def shared_files(pids: Iterable[int]) -> set[str]:
    """The files in shared memory that these processes have mapped."""
    return {path for pid in pids for path in _SHARED.findall(_maps(pid))}


def kill_marked(mark: dict[str, str], first: signal.Signals = signal.SIGTERM, grace_s: float = 3.0) -> None:
    """Ask every process of the run to end with ``first``, and kill what is left after ``grace_s`` seconds.

    Files in shared memory that only they had mapped are removed.
    """
    # Look again and again, for what was being started in the meantime.
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    shared: set[str] = set()
    while (alive := set(marked_pids(mark))) and time.monotonic() < deadline:
        shared |= shared_files(alive - asked)
        _signal(alive - asked, first)
        asked |= alive
        time.sleep(0.02)
    deadline = time.monotonic() + 10.0  # a killed process that holds a GPU needs a moment to go
    while (alive := set(marked_pids(mark))) and time.monotonic() < deadline:
        _signal(alive, signal.SIGKILL)
        time.sleep(0.05)
    if shared := {path for path in shared if os.path.exists(path)}:
        for path in shared - shared_files(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _maps(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "maps").read_text()
    except OSError:
        return ""


def _environ(pid: str) -> bytes:
    """The environment a process was started with; empty for one that is gone, a zombie, or another user's."""
    try:
        return Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return b""

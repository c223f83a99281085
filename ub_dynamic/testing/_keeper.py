# SPDX-License-Identifier: Apache-2.0
"""Waits for its standard input to end, then ends a run: its marked processes, its MPS daemon, its directory.

A program of its own with the standard library alone, started by :mod:`ub_dynamic.testing.mps`: it outlives a
starter that is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType


def main() -> None:
    task = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the starter, whose end is seen on the pipe
    while os.read(0, 4096):
        pass
    _marked().kill_marked(task["mark"])
    if task["mps"]:
        _quit_daemon(task["mps"], task["quit_s"])
    if task["folder"]:
        shutil.rmtree(task["folder"], ignore_errors=True)


def _marked() -> ModuleType:
    """The module beside this file, without importing the package (and torch with it)."""
    spec = importlib.util.spec_from_file_location("marked", Path(__file__).with_name("marked.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _quit_daemon(environment: dict[str, str], quit_s: float) -> None:
    """Ask the daemon to quit; kill it and its servers, and only those, if they do not."""
    pid_file = Path(environment["CUDA_MPS_PIPE_DIRECTORY"], "nvidia-cuda-mps-control.pid")
    try:
        daemon = int(pid_file.read_text())
    except (OSError, ValueError):
        return  # it never started
    servers = [int(word) for word in _tell(environment, "get_server_list").split() if word.isdigit()]
    _tell(environment, "quit")
    deadline = time.monotonic() + quit_s
    while alive := [pid for pid in (daemon, *servers) if _is_mps(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _tell(environment: dict[str, str], order: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            ["nvidia-cuda-mps-control"],
            input=f"{order}\n",
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=15,
            check=False,
        ).stdout
    return ""


def _is_mps(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"nvidia-cuda-mps" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


if __name__ == "__main__":
    main()

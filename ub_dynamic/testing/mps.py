# SPDX-License-Identifier: Apache-2.0
"""A private CUDA MPS daemon: started for one run, ended with it, even if the starter is killed.

Without MPS the processes on a GPU take turns, a time slice each. The daemon gets directories of its own, so
that it is neither found by others nor mistaken for theirs. A keeper process holds the other end of a pipe:
when that closes, for whatever reason, the keeper ends the run's processes, then the daemon, then the
directories. A daemon that the environment already names is used instead, and left alone: several runs can share one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..errors import UBUnsupportedError
from .marked import RUN_ID

CONTROL = "nvidia-cuda-mps-control"
_KEEPER = Path(__file__).with_name("_keeper.py")


def running() -> bool:
    """Whether ``CUDA_MPS_PIPE_DIRECTORY`` names a daemon that lives."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if not folder:
        return False
    try:
        os.kill(int(Path(folder, f"{CONTROL}.pid").read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


class Keeper:
    """Ends what belongs to one run when :meth:`close` is called or this process ends, however it ends.

    ``mark`` is the environment that marks the run's processes (:mod:`ub_dynamic.testing.marked`). With
    ``mps`` a private daemon is started, unless one is :func:`running`; ``environment`` is what its clients
    need; a daemon that does not quit within ``quit_s`` seconds is killed. ``device``: the UUID of the one GPU
    that the daemon serves (default: those of ``CUDA_VISIBLE_DEVICES``, as CUDA has them). Raises
    :class:`UBUnsupportedError` where the daemon is not installed or does not start.
    """

    def __init__(
        self, mark: Mapping[str, str], mps: bool = False, quit_s: float = 10.0, device: str | None = None
    ) -> None:
        mps = mps and not running()
        if mps and shutil.which(CONTROL) is None:
            raise UBUnsupportedError(f"{CONTROL} is not on PATH: it comes with the NVIDIA driver; run without MPS")
        # A short path: the daemon's sockets live here, and a socket's path has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="ubd_mps_")) if mps else None
        self.environment: dict[str, str] = {}
        if self._folder is not None:
            self.environment = {
                "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
                "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
            }
        task = {
            "mark": dict(mark),
            "mps": self.environment,
            "quit_s": quit_s,
            "folder": self._folder and str(self._folder),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_KEEPER), json.dumps(task)],
            # Without a mark: whoever ends a run that we are part of must leave the keeper to finish.
            env={name: value for name, value in os.environ.items() if name != RUN_ID},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        if self._folder is not None:
            try:
                self._start(self._folder, {} if device is None else {"CUDA_VISIBLE_DEVICES": device})
            except BaseException:
                self.close()
                raise

    def _start(self, folder: Path, more: Mapping[str, str]) -> None:
        for name in ("pipe", "log"):
            (folder / name).mkdir()
        # Output to a file: the daemon keeps what it inherits, and a pipe that it held would never end.
        with open(folder / "start.txt", "w+b") as output:
            done = subprocess.run(
                [CONTROL, "-d"],
                env={**os.environ, **self.environment, **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=30,
                check=False,
            )
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        if done.returncode:
            raise UBUnsupportedError(f"{CONTROL} -d ended with {done.returncode}: {said}")

    def close(self) -> None:
        """End the run's processes and the daemon, and wait until that is done."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait(60)

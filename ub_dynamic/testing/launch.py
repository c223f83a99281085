# SPDX-License-Identifier: Apache-2.0
"""Start a program on several ranks, wait for it with a timeout, and leave no process behind.

Works with MPICH, Open MPI and torchrun. MPICH's Hydra gives every rank a session of its own, so a process
group is not enough to find them all; each run is marked instead (`marked.py`). A keeper (`mps.py`) ends a run whose
starter is killed.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UBUnsupportedError
from .marked import kill_marked, marked_pids, new_mark
from .mps import Keeper

Launcher = Literal["mpirun", "torchrun"]

# Open MPI by default refuses root and more ranks than cores, and binds a rank to one core, where its progress
# thread and its GEMMs would take turns; ranks that spin starve each other on few cores.
_OPEN_MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # 5.x
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # 4.x
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # 5.x
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # 4.x
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_btl": "tcp,self",
}

# Its lines of log, and the traceback of its own that ends in a list of ranks between two rules.
_TORCHRUN = re.compile(
    r"^[^\n]*torch/distributed/(?:elastic/|run\.py:)[^\n]*\]\s[^\n]*\n"
    r"|^Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n)+"
    r"torch\.distributed\.elastic\.[^\n]*\n={20,}\n.*?\n={20,}\n?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class RankResult:
    """How a run ended. `leftover`: processes that outlived the launcher (ended before this is returned)."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    leftover: tuple[int, ...] = ()

    def check(self) -> RankResult:
        """Return self when the run exited 0 in time, else raise AssertionError with the end of its output."""
        if self.returncode == 0 and not self.timed_out:
            return self
        how = f"timed out after {self.seconds:.0f} s" if self.timed_out else f"exited {self.returncode}"
        raise AssertionError(
            f"{' '.join(self.command)}\n{how}\n"
            f"--- stdout, last 20 lines\n{tail(self.stdout, 20)}\n"
            f"--- stderr, last 40 lines\n{tail(self.stderr, 40)}"
        )


def run_ranks(
    program: str | Path,
    n: int,
    args: Sequence[str] = (),
    *,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    launcher: Launcher = "mpirun",
    cwd: str | Path | None = None,
) -> RankResult:
    """Run `program` (a .py file or a module name) on n ranks of this Python; wait at most `timeout` seconds.

    `env` is added to this process's environment.
    """
    with start_ranks(program, n, args, env=env, launcher=launcher, cwd=cwd) as run:
        return run.wait(timeout)


def start_ranks(
    program: str | Path,
    n: int,
    args: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    launcher: Launcher = "mpirun",
    cwd: str | Path | None = None,
) -> RankRun:
    """As `run_ranks`, but return at once: a context manager whose end ends every process of the run."""
    target = [str(program)] if str(program).endswith(".py") else ["-m", str(program)]
    command = [*launch_command(launcher, n), *target, *args]
    return RankRun(command, {**launch_env(launcher), **(env or {})}, cwd)


class RankRun:
    """A run under way: its output in files, and every process that belongs to it. It ends with this process, also if
    that is killed."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str | Path | None) -> None:
        self.command = tuple(command)
        self.mark = new_mark()
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._start = time.monotonic()
        self._keeper = Keeper(self.mark)
        try:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **env, **self.mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
            )
        except BaseException:
            self._keeper.close()
            raise

    def __enter__(self) -> RankRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.kill()
        self._keeper.close()
        self._out.close()
        self._err.close()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stdout(self) -> str:
        return _text(self._out.fileno())

    def stderr(self) -> str:
        return _text(self._err.fileno())

    def wait(self, timeout: float) -> RankResult:
        timed_out = False
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        seconds = time.monotonic() - self._start
        leftover = () if timed_out else self._outlived()
        self.kill()
        return RankResult(
            self.command, self._process.returncode, self.stdout(), self.stderr(), seconds, timed_out, leftover
        )

    def kill(self) -> None:
        """End every process of the run: launcher, proxies, ranks and what they started."""
        kill_marked(self.mark)
        self._process.wait()

    def _outlived(self) -> tuple[int, ...]:
        """What is still there a second after the launcher ended (a process needs a moment to go)."""
        for _ in range(20):
            if not (alive := marked_pids(self.mark)):
                break
            time.sleep(0.05)
        return alive


def launch_command(launcher: Launcher, n: int) -> list[str]:
    """The words before the program: the launcher, its options, and this Python."""
    if launcher == "torchrun":
        # A host whose own name does not resolve could not meet at it.
        flags = ["--standalone", "--local-addr=127.0.0.1", "--nnodes=1", f"--nproc-per-node={n}", "--no-python"]
        return [sys.executable, "-m", "torch.distributed.run", *flags, sys.executable]
    mpirun = find_mpirun()
    if mpirun is None:
        raise RuntimeError(mpi_missing())
    if shutil.which(mpirun) is None:
        raise UBUnsupportedError(
            f"UB_DYNAMIC_MPIRUN = {mpirun!r} is no program that can be run: name an mpirun, or unset it"
        )
    return [mpirun, "-n", str(n), sys.executable]


def launch_env(launcher: Launcher) -> dict[str, str]:
    """What a run needs beside the caller's environment: the ub_dynamic of this process and, unless the caller
    has set them, one thread a rank and Open MPI's permissions."""
    wanted = {"OMP_NUM_THREADS": "1"}
    if launcher == "mpirun" and mpi_flavor(find_mpirun()) == "openmpi":
        wanted |= _OPEN_MPI_ENV
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path} | {name: value for name, value in wanted.items() if name not in os.environ}


def find_mpirun() -> str | None:
    """UB_DYNAMIC_MPIRUN, else the mpirun beside this Python (a wheel's), else the first on PATH."""
    chosen = os.environ.get("UB_DYNAMIC_MPIRUN")
    if chosen:
        return chosen
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")


def mpi_missing() -> str | None:
    """Why MPI ranks cannot be started here, or None when they can."""
    from importlib.util import find_spec

    missing = [] if find_mpirun() else ["mpirun"]
    missing += [] if find_spec("mpi4py") else ["mpi4py"]
    return f"{' and '.join(missing)} not found: pip install 'ub_dynamic[mpi]'" if missing else None


@functools.cache
def mpi_flavor(mpirun: str | None) -> Literal["mpich", "openmpi", "unknown"]:
    """Which MPI an mpirun belongs to (Intel MPI's is a Hydra too, hence "mpich")."""
    if mpirun is None:
        return "unknown"
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False)
    text = (done.stdout + done.stderr).lower()
    if "open mpi" in text or "openrte" in text or "prrte" in text:
        return "openmpi"
    return "mpich" if "hydra" in text or "mpich" in text or "intel" in text else "unknown"


def tail(text: str, lines: int) -> str:
    """The last lines of what ranks said, without torchrun's own report, which comes last and says only that they
    failed."""
    return "\n".join(_TORCHRUN.sub("", text).splitlines()[-lines:])


def _text(fd: int) -> str:
    """All that a file holds; os.pread leaves alone the offset that the writing processes share."""
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a measurement: CPU ranks over MPI, ranks that share one GPU, or one rank a GPU.

The first rank writes one JSON line for each thing that it has to say; the starter reads them as they come, so a
measurement that is ended early, by Ctrl-C or its time, keeps what it has.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import UBUnsupportedError
from ..modes import CPU_MPI, gpu_mode, ranks_apart, ranks_on_one_gpu
from ..testing import one_gpu
from ..testing.launch import RankRun, mpi_missing, start_ranks, tail
from ..testing.mps import CONTROL, running
from .worlds import BackendName

EVENTS = "UB_DYNAMIC_BENCH_EVENTS"  # set in the ranks only: the file that the first of them writes to
PROGRAM = "ub_dynamic.bench.rank"
# NVLink multicast stays off: a program that uses it can put GPUs out of service that others share. One queue to the
# device, so that communication kernels start in the order in which TE enqueues them.
_GPU_ENV = {
    "UB_SKIPMC": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
_POLL_S = 0.1

OnEvent = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Ended:
    """``status``: 0, the exit status of the first rank that failed, or 124 on a timeout. ``events`` in order."""

    status: int
    events: tuple[Mapping[str, Any], ...]
    output: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [dict(event["row"]) for event in self.events if "row" in event]


def mode_of(backend: BackendName, ranks: int) -> str:
    """The mode in which ``ranks`` ranks run here; :class:`UBUnsupportedError` with what is missing.

    ``te``: one rank a GPU if there are as many, else all on the first GPU.
    """
    if ranks < 2:
        raise UBUnsupportedError(f"{ranks} rank: tensor parallelism needs at least 2")
    if backend == "host":
        if (missing := mpi_missing()) is not None:
            raise UBUnsupportedError(f"the host backend is measured over MPI: {missing}")
        return CPU_MPI
    import torch

    devices = torch.cuda.device_count()
    if devices == 0:
        raise UBUnsupportedError("backend te needs a CUDA device, and torch sees none; --backend host needs none")
    return gpu_mode(ranks, shared=devices < ranks)


def run(
    job: Mapping[str, Any],
    backend: BackendName,
    ranks: int,
    timeout_s: float,
    on_event: OnEvent | None = None,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Measure ``job`` (``{"bench": name, "options": {...}}``) on ``ranks`` ranks of this machine.

    ``env`` is added to the environment of the ranks, where the caller has not set it.
    """
    mode = mode_of(backend, ranks)
    with tempfile.TemporaryDirectory(prefix="ub_dynamic-") as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps({**job, "backend": backend, "mode": mode}))
        return collect(["-m", PROGRAM, str(file)], mode, ranks, timeout_s, on_event, env=env)


def collect(
    words: Sequence[str],
    mode: str,
    ranks: int,
    timeout_s: float,
    on_event: OnEvent | None = None,
    *,
    mps: bool = True,
    output: BinaryIO | None = None,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``python <words>`` on the ranks of ``mode`` and collect what the first of them says.

    ``output``: what the ranks print goes there too, line by line where they share a GPU, else at the end. A signal ends
    the ranks and goes on as the exception that it is here; ``on_event`` has got what they said until then.
    """
    with tempfile.TemporaryDirectory(prefix="ub_dynamic-") as folder:
        path = Path(folder, "events")
        path.touch()
        added = {name: value for name, value in (env or {}).items() if name not in os.environ}
        environment = {**added, EVENTS: str(path), "PYTHONPATH": _python_path()}
        with _Reader(path, on_event) as reader:
            if ranks_on_one_gpu(mode):
                status, said = _on_one_gpu(words, ranks, timeout_s, environment, mps, output)
            else:
                status, said = _launched(words, mode, ranks, timeout_s, environment)
                if output is not None:
                    output.write(said.encode())
                    output.flush()
        return Ended(status, tuple(reader.events), said)


def _on_one_gpu(
    words: Sequence[str],
    ranks: int,
    timeout_s: float,
    environment: Mapping[str, str],
    mps: bool,
    output: BinaryIO | None,
) -> tuple[int, str]:
    mps = mps and (running() or shutil.which(CONTROL) is not None)
    options = one_gpu.OneGpu(ranks, mps=mps, timeout_s=timeout_s, env=environment)
    with tempfile.TemporaryFile() as kept:
        stream = cast(BinaryIO, kept) if output is None else output
        status = one_gpu.run([sys.executable, "-W", "ignore", *words], options, stream).returncode
        kept.seek(0)
        return status, kept.read().decode(errors="replace")


def _launched(
    words: Sequence[str], mode: str, ranks: int, timeout_s: float, environment: Mapping[str, str]
) -> tuple[int, str]:
    gpus = ranks_apart(mode) > 0
    kept = {name: value for name, value in _GPU_ENV.items() if gpus and name not in os.environ}
    launcher: Any = "torchrun" if gpus else "mpirun"
    program, arguments = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
    with start_ranks(program, ranks, arguments, env={**kept, **environment}, launcher=launcher) as started:
        return _wait(started, timeout_s)


def _wait(started: RankRun, timeout_s: float) -> tuple[int, str]:
    result = started.wait(timeout_s)
    output = f"{tail(result.stdout, 200)}\n{tail(result.stderr, 200)}"
    return (one_gpu.TIMED_OUT if result.timed_out else result.returncode), output


class _Reader:
    """Passes whole lines of a growing file on, in a thread of its own."""

    def __init__(self, path: Path, on_event: OnEvent | None) -> None:
        self.events: list[Mapping[str, Any]] = []
        self._path, self._on_event = path, on_event
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._waiting = threading.get_ident()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._left = ""

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        try:
            self._thread.join()
        except (KeyboardInterrupt, SystemExit):  # the reader's own, which came late
            if self._error is None:
                raise
            self._thread.join()
        if self._error is not None:
            raise self._error from None

    def _follow(self) -> None:
        with self._path.open() as file:
            while True:
                last = self._ended.is_set()
                self._take(file.read())
                if last:
                    return
                self._ended.wait(_POLL_S)

    def _take(self, text: str) -> None:
        *lines, self._left = (self._left + text).split("\n")
        for line in lines:
            event = json.loads(line)
            self.events.append(event)
            if self._on_event is not None and self._error is None:
                try:
                    self._on_event(event)
                except Exception as error:  # raised in the thread that waits for the ranks, which end with it
                    self._error = error
                    self._interrupt()

    def _interrupt(self) -> None:
        """End the wait for the ranks, where it is one of the main thread, which alone can be interrupted: by Ctrl-C, or
        where that is ignored, as in a shell's background job, by a signal that unwinds like it."""
        heard = [number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))]
        main = threading.main_thread()
        if heard and not self._ended.is_set() and main.ident is not None and main.ident == self._waiting:
            signal.pthread_kill(main.ident, heard[0])


def _python_path() -> str:
    source = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))

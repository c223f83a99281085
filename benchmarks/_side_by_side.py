# SPDX-License-Identifier: Apache-2.0
"""Runs programs side by side on the GPUs of a machine, ends those that are late, keeps every log.

One program a GPU at a time. Kernels of TE's reduce-scatter spin on up to 32 of its 132 processors until those of the
other ranks come, and two programs were seen to starve each other's until TE's own timeout (20 s) let them go on with
wrong data; NCCL's kernels spin as well. And clients of one MPS daemon share their fate: a program that ends in the
middle of its kernels ends in an illegal memory access for the one beside it. A machine with several GPUs works on
several programs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ub_dynamic.testing.marked import new_mark
from ub_dynamic.testing.mps import CONTROL, Keeper
from ub_dynamic.testing.one_gpu import TIMED_OUT, exit_status

ROOT = Path(__file__).resolve().parents[1]
MINIMUM_S = 15.0  # a part is not started with less time than this
SLOTS = 1  # programs a GPU


@dataclass(frozen=True)
class Part:
    """``command`` without the interpreter; ``{out}``, ``{limit}`` and what the options add are filled in.

    ``result``: the file that it writes into ``{out}``. ``ranks``: of one start. ``gpu``: the one that it prefers.
    ``mps``: on the shared daemon. ``alone``: nothing beside it on its GPU. ``older_te``: in the environment of
    another version. ``env``: added to its environment.
    """

    name: str
    command: tuple[str, ...]
    timeout_s: float
    result: str | None = None
    ranks: int = 2
    gpu: int = 0
    mps: bool = True
    alone: bool = False
    older_te: bool = False
    env: tuple[tuple[str, str], ...] = ()

    @property
    def slots(self) -> int:
        return SLOTS if self.alone else 1


@dataclass
class Gpu:
    """``environment``: of every part on it; ``daemon``: what clients of the shared daemon need beside."""

    number: int
    environment: dict[str, str]
    processors: tuple[int, ...]
    daemon: dict[str, str] = field(default_factory=dict)
    free: int = SLOTS


@dataclass
class Running:
    part: Part
    gpu: Gpu
    process: subprocess.Popen[bytes]
    begin: float
    deadline: float
    log: Path


@dataclass(frozen=True)
class Ended:
    """``status`` is None for a part that was not run, 124 for one that was late."""

    part: Part
    status: int | None
    seconds: float
    log: Path | None


class Runner:
    """Starts parts where there is room. ``told``: called with every part that has ended."""

    def __init__(
        self, out: Path, told: Callable[[Ended], None], words: Mapping[str, str], older_te: Path | None = None
    ) -> None:
        self.gpus = find_gpus()
        self._out, self._told, self._words, self._older_te = out, told, dict(words), older_te
        self._environ = dict(os.environ)  # a program that is imported to merge results may change it
        self._running: list[Running] = []

    def phase(self, parts: Sequence[Part], until: float, meanwhile: Callable[[], None]) -> None:
        """Run ``parts``, in their order where there is room, until all have ended or the time (monotonic) is up."""
        # the widest first: otherwise narrow ones would keep it from ever finding room
        pending = sorted(parts, key=lambda part: -part.slots)
        while (pending or self._running) and time.monotonic() < until:
            for part in list(pending):
                gpu = self._room(part, pending)
                if gpu is not None and until - time.monotonic() >= MINIMUM_S:
                    pending.remove(part)
                    self._running.append(self._start(part, gpu, until))
            if not self._running:
                break
            time.sleep(0.1)
            self._finish([one for one in self._running if one.process.poll() is not None], late=False)
            self._finish([one for one in self._running if time.monotonic() > one.deadline], late=True)
            meanwhile()
        self._finish(list(self._running), late=True)
        for part in pending:
            self._told(Ended(part, None, 0.0, None))

    def _room(self, part: Part, pending: Sequence[Part]) -> Gpu | None:
        """The GPU that the part prefers, or one that no other part waits for."""
        count = len(self.gpus)
        waited_for = {one.gpu % count for one in pending}
        wanted = self.gpus[part.gpu % count]
        others = [gpu for gpu in self.gpus if gpu.number not in waited_for]
        return next((gpu for gpu in (wanted, *others) if gpu.free >= part.slots), None)

    def _start(self, part: Part, gpu: Gpu, until: float) -> Running:
        folder = self._out / "parts" / part.name
        folder.mkdir(parents=True, exist_ok=True)
        log = self._out / "logs" / f"{part.name}.log"
        log.parent.mkdir(exist_ok=True)
        begin = time.monotonic()
        limit = min(part.timeout_s, until - begin)
        words = {**self._words, "{out}": str(folder), "{limit}": f"{max(5.0, limit - 5):.0f}"}
        command = [sys.executable, *(_filled(word, words) for word in part.command)]
        environment = {**self._environ, **gpu.environment, **dict(part.env), "PYTHONUNBUFFERED": "1"}
        if part.mps and not part.alone:
            environment |= gpu.daemon
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), self._environ.get("PYTHONPATH")]))
        if part.older_te:
            # its env.sh instead of that of the version which is here
            script = 'export PYTHONPATH=; . "$0" && export PYTHONPATH="$ROOT:$PYTHONPATH" && exec "$@"'
            command = ["bash", "-c", script, str(self._older_te), *command]
            environment["ROOT"] = str(ROOT)
        processors = set(gpu.processors) if part.alone else os.sched_getaffinity(0)
        with open(log, "ab", buffering=0) as file:
            file.write(f"===== {part.name}, GPU {gpu.number}: {' '.join(command)}\n".encode())
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, processors),
            )
        gpu.free -= part.slots
        return Running(part, gpu, process, begin, begin + limit, log)

    def _finish(self, parts: Sequence[Running], late: bool) -> None:
        """Take note of parts that have ended; those that are late are all asked to, before any is waited for."""
        for one in parts if late else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGTERM)
        for one in parts:
            _wait_for_group(one.process)
            self._running.remove(one)
            one.gpu.free += one.part.slots
            code = TIMED_OUT if late else exit_status(one.process.returncode)
            self._told(Ended(one.part, code, time.monotonic() - one.begin, one.log))


def _filled(word: str, words: Mapping[str, str]) -> str:
    for key, value in words.items():
        word = word.replace(key, value)
    return word


def _wait_for_group(process: subprocess.Popen[bytes], patience_s: float = 20.0) -> None:
    """Until the program and the launchers that it started are gone; they take their ranks and daemons with them."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_gpus() -> list[Gpu]:
    """The GPUs, by UUID where there are several and ``CUDA_VISIBLE_DEVICES`` names none; each with its share of the
    processors.
    """
    named: list[str] = []
    if shutil.which("nvidia-smi") and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
        named = re.findall(r"UUID: (GPU-[0-9a-f-]+)", done.stdout)
    processors = sorted(os.sched_getaffinity(0))
    if len(named) < 2:
        return [Gpu(0, {}, tuple(processors))]
    share = max(1, len(processors) // len(named))
    return [
        Gpu(number, {"CUDA_VISIBLE_DEVICES": uuid}, tuple(processors[number * share : (number + 1) * share]))
        for number, uuid in enumerate(named)
    ]


@contextlib.contextmanager
def shared_daemons(gpus: Sequence[Gpu]) -> Iterator[None]:
    """An MPS daemon for each GPU, where the driver has one."""
    keepers: list[Keeper] = []
    try:
        for gpu in gpus if shutil.which(CONTROL) else ():
            keepers.append(Keeper(new_mark(), True, device=gpu.environment.get("CUDA_VISIBLE_DEVICES")))
            gpu.daemon = keepers[-1].environment
        yield
    finally:
        for keeper in keepers:
            keeper.close()
        for gpu in gpus:
            gpu.daemon = {}

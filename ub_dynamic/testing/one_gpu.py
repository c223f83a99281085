# SPDX-License-Identifier: Apache-2.0
"""Several tensor-parallel ranks on one GPU: a launcher for developers who have one card and TP code to run.

Each rank is a process of its own on the same device. Three things stand in the way, and each is answered:

- NCCL refuses two ranks on one device of one host: every rank gets a ``NCCL_HOSTID`` of its own, so NCCL
  takes them for separate hosts and goes through sockets on the loopback interface. Correct, but slow.
- TE's UserBuffers want multicast (``UB_SKIPMC=1``) and peer access to every rank's device
  (:mod:`ub_dynamic.testing.peer_access`); the buffers themselves are shared through CUDA IPC.
- Processes on one device take turns, a time slice each. A private MPS daemon (``mps=True``) lets their
  kernels run side by side, so that a step costs milliseconds instead of tens of them.

Results are right in this mode; times are not those of several GPUs, and a comparison with NCCL means nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from ..errors import UBShapeError, UBStateError
from ..seconds import check_seconds
from .marked import kill_marked, new_mark
from .mps import Keeper
from .peer_access import peer_access_library

MODE_VARIABLE = "UB_DYNAMIC_ONE_GPU"
LABEL = (
    "{ranks} ranks share ONE GPU: results are right, but NCCL goes through sockets here, "
    "so timings against NCCL mean nothing in this mode"
)
_HINT = (
    "every rank has cuda:0 alone; a script that calls torch.cuda.set_device(LOCAL_RANK) needs "
    "--local-rank zero, or ub_dynamic.testing.one_gpu.device()"
)
TIMED_OUT = 124  # exit status, as of coreutils' timeout


@dataclass(frozen=True)
class OneGpu:
    """How to start the ranks.

    ``device``: index or UUID of the GPU, by default the first of ``CUDA_VISIBLE_DEVICES``. ``mps``: start a
    private MPS daemon for this run, or use the one that the environment names (``CUDA_MPS_PIPE_DIRECTORY``).
    ``local_rank``: ``"rank"`` sets LOCAL_RANK as torchrun does on one host, ``"zero"`` sets it to 0 on every
    rank, for scripts that choose their device by it. ``timeout_s``: end everything after that many seconds
    (exit status 124). ``env``: added to the environment of every rank, and stronger than
    what is set here.
    """

    ranks: int
    device: str | None = None
    mps: bool = False
    local_rank: str = "rank"
    timeout_s: float | None = None
    grace_s: float = 5.0
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 64:
            raise UBShapeError(f"ranks is {self.ranks}: one GPU takes 1 to 64")
        if self.local_rank not in ("rank", "zero"):
            raise UBShapeError(f"local_rank is {self.local_rank!r}: it is 'rank' or 'zero'")
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s)


@dataclass(frozen=True)
class Outcome:
    """``returncode``: 0, or that of the first rank that failed (128 + signal if a signal ended it), or 124 on
    a timeout. ``failed_rank``: which one it was.
    """

    returncode: int
    failed_rank: int | None
    seconds: float


def rank_environment(rank: int, options: OneGpu, port: int, library: Path) -> dict[str, str]:
    """What rank ``rank`` needs beside the environment of the launcher; the caller's own settings are kept
    where another value is as good.
    """
    preload = os.pathsep.join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    fixed = {
        "RANK": str(rank),
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_RANK": str(rank) if options.local_rank == "rank" else "0",
        "LOCAL_WORLD_SIZE": str(options.ranks) if options.local_rank == "rank" else "1",
        "GROUP_RANK": "0" if options.local_rank == "rank" else str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": options.device or _first_device(),
        "NCCL_HOSTID": f"one-gpu-{os.getpid()}-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "UB_SKIPMC": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "LD_PRELOAD": preload,
        MODE_VARIABLE: str(options.ranks),
    }
    preferred = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    kept = {name: value for name, value in preferred.items() if name not in os.environ}
    return {**fixed, **kept, **options.env}


def active_ranks(environ: Mapping[str, str] | None = None) -> int | None:
    """How many ranks share this process's GPU, or None outside a one-GPU run."""
    value = (os.environ if environ is None else environ).get(MODE_VARIABLE)
    return int(value) if value else None


def device() -> str:
    """The device of this rank: ``"cuda:0"`` in a one-GPU run, else that of its LOCAL_RANK."""
    return "cuda:0" if active_ranks() else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def run(command: Sequence[str], options: OneGpu, output: BinaryIO | None = None) -> Outcome:
    """Run ``command`` on every rank and wait; each line of output goes to ``output`` (stdout) behind its
    rank.

    When a rank fails, the others are ended; Ctrl-C, SIGTERM and SIGHUP end all of them. Neither a rank, nor
    what it started, nor the MPS daemon outlives this call, not even if this process is killed.
    """
    if not command:
        raise UBShapeError("no command: one-gpu -n 2 -- python script.py")
    if shutil.which(command[0]) is None:
        raise UBStateError(f"{command[0]} is not a program on PATH")
    stream = sys.stdout.buffer if output is None else output
    library = peer_access_library()
    mark = new_mark()
    start = time.monotonic()
    keeper = Keeper(mark, options.mps)
    _say(LABEL.format(ranks=options.ranks) + (", MPS on" if options.mps else ", no MPS: ranks take turns"))
    try:
        with signals_as_exit():
            port = _free_port()
            environments = [
                {**os.environ, **keeper.environment, **rank_environment(rank, options, port, library), **mark}
                for rank in range(options.ranks)
            ]
            ranks = _Ranks(command, environments, stream)
            try:
                code, failed = ranks.wait(None if options.timeout_s is None else start + options.timeout_s)
            finally:
                kill_marked(mark, signal.SIGTERM, options.grace_s)
                ranks.finish()
    finally:
        keeper.close()
    if ranks.bad_ordinal:
        _say(_HINT)
    seconds = time.monotonic() - start
    if code:
        _say(f"rank {failed} ended with {code}" if failed is not None else f"ended after {options.timeout_s:g} s")
    _say(LABEL.format(ranks=options.ranks))
    return Outcome(code, failed, seconds)


class _Ranks:
    """The processes of a run and the threads that pass their output on."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], stream: BinaryIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self.bad_ordinal = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pumps: list[threading.Thread] = []
        for rank, environment in enumerate(environments):
            process = subprocess.Popen(
                list(command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._processes.append(process)
            assert process.stdout is not None
            pump = threading.Thread(target=self._pass_on, args=(rank, process.stdout), daemon=True)
            pump.start()
            self._pumps.append(pump)

    def _pass_on(self, rank: int, source: IO[bytes]) -> None:
        prefix = f"[rank {rank}] ".encode()
        for line in iter(source.readline, b""):
            if b"invalid device ordinal" in line:
                self.bad_ordinal = True
            with self._lock:
                self._stream.write(prefix + line.rstrip(b"\r\n") + b"\n")
                self._stream.flush()
        source.close()

    def wait(self, deadline: float | None) -> tuple[int, int | None]:
        """Exit status and rank of the first that fails, (0, None) when all end well, (124, None) at the
        deadline.
        """
        while True:
            codes = [process.poll() for process in self._processes]
            for rank, code in enumerate(codes):
                if code:
                    return exit_status(code), rank
            if None not in codes:
                return 0, None
            if deadline is not None and time.monotonic() > deadline:
                return TIMED_OUT, None
            time.sleep(0.02)

    def finish(self) -> None:
        for process in self._processes:
            process.wait()
        for pump in self._pumps:
            pump.join(5)


def _first_device() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def _free_port() -> int:
    """A port that is free now, and that no socket is given which asks for any port.

    Rank 0 listens on it many seconds later, when it has imported its libraries; until then the ranks of other runs
    may have opened hundreds of sockets.
    """
    try:
        given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        given = 32768
    choose = random.SystemRandom()
    for _ in range(100):
        port = choose.randrange(10000, given) if given > 10100 else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise UBStateError("no port is free on 127.0.0.1")


def exit_status(ended: int | KeyboardInterrupt | SystemExit) -> int:
    """A status as shells have it: 128 + N where signal N was the end.

    ``ended``: the returncode of a child, or what ends this process (:func:`signals_as_exit`).
    """
    if isinstance(ended, KeyboardInterrupt):
        ended = -signal.SIGINT
    elif isinstance(ended, SystemExit):
        ended = ended.code if isinstance(ended.code, int) else int(ended.code is not None)  # a text is printed: 1
    return 128 - ended if ended < 0 else ended


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C does, so that the ranks are ended. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(exit_status(-number))

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"one-gpu: {text}", file=sys.stderr, flush=True)

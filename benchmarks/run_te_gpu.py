# SPDX-License-Identifier: Apache-2.0
"""Every GPU check and measurement of the TE backend in one command, the most important first.

    python benchmarks/run_te_gpu.py --out results --budget 540

Each part is a process of its own with its own timeout, ended with all that it started; the next one runs
whatever became of it. Results are written as soon as a part has them, ``--archive`` keeps one file of all of
them current.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MINIMUM_S = 15.0  # a part is not started with less time than this


@dataclass(frozen=True)
class Part:
    """``command`` without the interpreter; ``result``: the file it writes in the results folder."""

    name: str
    command: tuple[str, ...]
    timeout_s: float
    result: str | None = None


def _one_gpu(ranks: int, *program: str) -> tuple[str, ...]:
    return (
        "-m",
        "ub_dynamic.cli.one_gpu",
        "-n",
        str(ranks),
        "--mps",
        "--timeout",
        "80",
        "--",
        sys.executable,
        *program,
    )


def _benchmark(name: str, timeout_s: float, *arguments: str, result: str | None = None, part: str = "") -> Part:
    starts = 1 if "--tp" in arguments else 2
    command = (f"benchmarks/{name}.py", "--timeout", str(timeout_s / starts - 5), *arguments)
    return Part(part or name.removeprefix("te_"), command, timeout_s, result or name)


PARTS: tuple[Part, ...] = (
    Part("smoke", _one_gpu(2, "tests/gpu/smoke.py"), 90),
    _benchmark("te_bits", 360),
    _benchmark("te_step", 240),
    _benchmark("te_set_shape", 140, "--no-mps"),
    _benchmark("te_stress", 150),
    _benchmark("te_graphs", 120),
    _benchmark("te_reinit", 120, "--no-mps"),
    Part("tests", ("-m", "pytest", "-q", "tests/gpu"), 420),
    _benchmark("te_memcheck", 300, "--tp", "2"),
    _benchmark(
        "te_bits", 200, "--tp", "8", "--lengths", "12", "--name", "te_bits_tp8", result="te_bits_tp8", part="bits8"
    ),
)


def run(part: Part, out: Path, timeout_s: float, log: Path) -> tuple[int, float]:
    """Exit status (124 at the timeout) and seconds; the output goes to the log and to stdout."""
    command = [sys.executable, *part.command]
    if part.result:
        command += ["--out", str(out)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    begin = time.monotonic()
    with open(log, "ab", buffering=0) as file:
        file.write(f"\n===== {part.name}: {' '.join(command)}\n".encode())
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            _end(process)
    return code, time.monotonic() - begin


def _end(process: subprocess.Popen[bytes]) -> None:
    """A launcher that is asked to end takes its ranks and its MPS daemon with it."""
    for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            if number is signal.SIGTERM:
                time.sleep(0.2)
            return


def figures(part: Part, out: Path) -> str:
    path = out / f"{part.result}.json"
    if part.result is None or not path.exists():
        return ""
    return ", ".join(f"{k} {v:.4g}" for k, v in json.loads(path.read_text())["figures"].items())


def archive(out: Path, target: Path | None) -> None:
    if target is not None:
        partial = target.with_name(target.name + ".tmp")
        with tarfile.open(partial, "w:gz") as tar:
            tar.add(out, arcname=out.name)
        partial.replace(target)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of result files and the log")
    parser.add_argument("--only", nargs="+", choices=names, help="these parts alone, in this order")
    parser.add_argument("--skip", nargs="+", choices=names, default=[])
    parser.add_argument("--budget", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the folder, made anew after each part")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "run_te_gpu.log"
    end = time.monotonic() + options.budget
    parts = {part.name: part for part in PARTS}
    summary: list[tuple[str, int | None, float, str]] = []
    for name in options.only or names:
        if name in options.skip:
            continue
        left = end - time.monotonic()
        if left < MINIMUM_S:
            summary.append((name, None, 0.0, "not run: no time left"))
            continue
        size = log.stat().st_size if log.exists() else 0
        code, seconds = run(parts[name], out, min(parts[name].timeout_s, left - 5), log)
        summary.append((name, code, seconds, figures(parts[name], out)))
        print(f"{name}: status {code}, {seconds:.0f} s. {summary[-1][3]}", flush=True)
        if code:
            _tail(log, size)
        archive(out, options.archive)
    print("\nsummary")
    for name, status, seconds, text in summary:
        print(f"{name:10} {'-' if status is None else status:>4} {seconds:6.0f} s  {text}")
    archive(out, options.archive)
    return int(any(status != 0 for _, status, _, _ in summary))


def _tail(log: Path, start: int, size: int = 5000) -> None:
    text = log.read_bytes()[start:]
    print(text[-size:].decode(errors="replace"), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""How long `advise` takes for ten million lengths in each format, and how much memory. Writes advise.json.

Each format is read, packed and reported by the command itself in a process of its own. The figures are the largest
of all runs (``cpu_seconds``: of the processor, whatever else ran beside it); the lengths are log-normal, much as
documents of a corpus are. Another process writes the files: a child's peak is at least what its parent holds.

python benchmarks/advise.py --lengths 10000000
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ub_dynamic.testing.results import write_result

WORDS = ["--capacity", "16384", "--tp", "4", "--cp", "2", "--hidden", "4096"]


def generated(count: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(6.5, 1.1, count)
    return np.clip(drawn, 1, 65536).astype(np.int64)


def write_text(path: Path, lengths: np.ndarray) -> None:
    path.write_text("".join(f"{length}\n" for length in lengths.tolist()))


def write_json(path: Path, lengths: np.ndarray) -> None:
    with path.open("w") as file:
        file.writelines(f'{{"id": {i}, "length": {length}}}\n' for i, length in enumerate(lengths.tolist()))


def write_parquet(path: Path, lengths: np.ndarray) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"length": lengths}), path)


WRITERS: dict[str, Callable[[Path, np.ndarray], None]] = {
    "txt": write_text,
    "jsonl": write_json,
    "parquet": write_parquet,
}


def measure(path: Path, plan: str) -> dict[str, Any]:
    """Seconds, processor seconds and peak bytes of one run of the command, as the kernel counts them."""
    command = [sys.executable, "-m", "ub_dynamic", "advise", str(path), *WORDS, "--plan", plan, "--json"]
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{path.name} with plan {plan} ended with {child.returncode}")
    return {
        "format": path.suffix[1:],
        "plan": plan,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def write_files(folder: Path, count: int) -> None:
    lengths = generated(count)
    for suffix, write in WRITERS.items():
        write(folder / f"lengths.{suffix}", lengths)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lengths", type=int, default=10_000_000)
    count = options.parse_args().lengths
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = multiprocessing.get_context("spawn").Process(target=write_files, args=(folder, count))
        writer.start()
        writer.join()
        for suffix in WRITERS:
            for plan in ("packed", "fixed"):
                rows.append(measure(folder / f"lengths.{suffix}", plan))
                print(rows[-1], flush=True)
    figures = {
        "lengths": count,
        "seconds": max(row["seconds"] for row in rows),
        "cpu_seconds": max(row["cpu_seconds"] for row in rows),
        "peak_bytes": max(row["peak_bytes"] for row in rows),
    }
    write_result("advise", figures, rows, mode="cpu-mpi")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""A plan of parts for a machine that is there for minutes: a process each, the most important first, taken up again.

A part is begun only where it fits, ended where it does not end, and done when its file has every row. The files of all
parts can travel in one archive, from which the next command goes on, also on a machine that has none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # a machine that has a copy of the tree, and nothing installed

import _one_gpu  # noqa: E402

from ub_dynamic.testing.launch import RankRun, tail  # noqa: E402

START_S = 33.0  # starting ranks, imports, compiling
GRACE_S = 45.0  # beyond its seconds, before a part is ended
END_S = 10.0  # what a part's own program has, to end its ranks and to write what they measured
BUDGET_S = 550.0  # a command of 600 s, with what ends the last part and packs
INNER = "results"  # the folder in an archive


@dataclass(frozen=True)
class Part:
    """``words``: of its command, without the interpreter; ``{limit}`` becomes the seconds that it may take.

    ``seconds``: to measure in. ``writes``: its result, or its tuning table, of ``rows`` measured rows. ``table``: what
    it was measured with; a result from before that table grew is not done. ``resumes``: rows that are there are kept.
    """

    name: str
    words: tuple[str, ...]
    seconds: float
    writes: Path
    rows: int = 0
    table: Path | None = None
    resumes: bool = False

    @property
    def needs_s(self) -> float:
        """A part is begun with so much time left."""
        return START_S + self.seconds + END_S


def is_done(part: Part) -> bool:
    """Whether the file has every row, none of its starts failed, and it is of the table that is there."""
    record = _read(part.writes)
    if record is None or record.get("figures", {}).get("failed_starts", 0):
        return False
    table = None if part.table is None else _read(part.table)
    if table is not None and record.get("date", "") < table["date"]:
        return False
    return measured_rows(part.writes) >= part.rows


def measured_rows(path: Path) -> int:
    """Of a result all; of a tuning table those that are not filled with the default only."""
    return sum(row.get("candidates") != [] for row in (_read(path) or {}).get("rows", ()))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record


def run(parts: Sequence[Part], out: Path, budget_s: float, after: Callable[[], None] = lambda: None) -> list[str]:
    """Run the parts that are not done, as far as the time goes; the names of those that are not done then.

    A table that has grown, and misses rows, is taken up again at once. ``after``: what is done after each.
    """
    end = time.monotonic() + budget_s
    queue, left_over = list(parts), []
    while queue:
        part = queue.pop(0)
        if is_done(part):
            _say(part, f"is there already: {part.writes.name}")
            continue
        left = end - time.monotonic()
        if left < part.needs_s:
            _say(part, f"no time left: {left:.0f} s, it needs {part.needs_s:.0f}")
            left_over.append(part.name)
            continue
        before = measured_rows(part.writes)
        good = _run_one(part, out, min(left, START_S + part.seconds + GRACE_S))
        after()
        if good and is_done(part):
            continue
        rows = measured_rows(part.writes)
        _say(part, f"is not done: {rows} of {part.rows} rows" if part.rows else "is not done")
        if good and part.resumes and rows > before:
            queue.insert(0, part)
        else:
            left_over.append(part.name)
    return left_over


def _run_one(part: Part, out: Path, limit: float) -> bool:
    part.writes.parent.mkdir(parents=True, exist_ok=True)
    words = [word.replace("{limit}", f"{limit - END_S:.0f}") for word in part.words]
    with RankRun([sys.executable, *words], environment(limit - part.seconds), HERE.parent) as running:
        result = running.wait(limit)
    (out / f"{part.name}.log").write_text(f"{result.stdout}\n{result.stderr}")
    ended = "timed out" if result.timed_out else f"status {result.returncode}"
    _say(part, f"{ended}, {result.seconds:.0f} s")
    good = not result.returncode and not result.timed_out
    if not good:
        print(tail(result.stdout, 200), tail(result.stderr, 200), sep="\n", flush=True)
    return good


def environment(beside_s: float = START_S + GRACE_S) -> dict[str, str]:
    """Of a part that may take ``beside_s`` beside its seconds: a program ends its ranks itself, and keeps their rows,
    before it is ended here."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "COLUMNS": "160", "UB_DYNAMIC_BENCH_START_S": f"{beside_s - END_S:g}"}


def _say(part: Part, text: str) -> None:
    print(f"{part.name:24} {text}", flush=True)


def in_commands(parts: Sequence[Part], budget_s: float) -> list[list[Part]]:
    """Which parts each command of ``budget_s`` reaches, as :func:`run` goes on with what is left."""
    commands: list[list[Part]] = []
    waiting = list(parts)
    while waiting:
        left, reached = budget_s, []
        for part in list(waiting):
            if left >= part.needs_s:
                reached.append(part)
                waiting.remove(part)
                left -= START_S + part.seconds
        if not reached:
            raise ValueError(
                f"{waiting[0].name} needs {waiting[0].needs_s:.0f} s: more than a budget of {budget_s:g} s"
            )
        commands.append(reached)
    return commands


def show(parts: Sequence[Part], budget_s: float) -> None:
    """The plan: what runs in which command, and how long."""
    for number, reached in enumerate(in_commands(parts, budget_s), 1):
        for part in reached:
            seconds = START_S + part.seconds
            print(f"command {number}  {part.name:24} {seconds:5.0f} s  python {' '.join(part.words)}")
        print(f"command {number}  in all {sum(START_S + part.seconds for part in reached):5.0f} s of {budget_s:.0f} s")


def pack(archive: Path | None, out: Path) -> None:
    """One file of everything that is in ``out`` so far."""
    if archive is None:
        return
    partial = archive.with_name(f"{archive.name}.tmp")
    with tarfile.open(partial, "w:gz") as tar:
        for path in sorted(out.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # a program beside this one has put it in place
                if path.is_file() and path.suffix != ".tmp":
                    tar.add(path, arcname=Path(INNER) / path.relative_to(out))
    partial.replace(archive)


def unpack(archive: Path | None, out: Path) -> None:
    """What an earlier command packed, where ``archive`` is there; a file that ``out`` has is kept."""
    if archive is None or not archive.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        for path in sorted(Path(folder, INNER).rglob("*")):
            target = out / path.relative_to(Path(folder, INNER))
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)


def options_of(description: str) -> argparse.ArgumentParser:
    """What every plan takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--gpus", type=int, default=2, choices=(2, 4, 8), help="ranks, one a GPU")
    made.add_argument("--out", type=Path, default=None, help="folder of result files, tables and logs")
    made.add_argument("--archive", type=Path, help="a .tar.gz of --out: unpacked first, made anew after each part")
    made.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of this command; the next one goes on")
    made.add_argument("--only", nargs="+", help="these parts alone")
    made.add_argument("--skip", nargs="+", default=[], help="without these parts")
    made.add_argument("--dry-run", action="store_true", help="print the plan, with seconds, and run nothing")
    return made


def main(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    parts: Sequence[Part],
    out: Path,
    finish: Callable[[], object] = lambda: None,
) -> int:
    """Run, or show, what ``options`` leave of ``parts``; ``finish``: what is made of all files, after each part."""
    if unknown := {*(options.only or ()), *options.skip} - {part.name for part in parts}:
        parser.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(part.name for part in parts)}")
    wanted = set(options.only or (part.name for part in parts)) - set(options.skip)
    chosen = [part for part in parts if part.name in wanted]
    if options.dry_run:
        show(chosen, options.budget)
        return 0
    if (missing := _one_gpu.gpus_missing(options.gpus)) is not None:
        parser.error(f"--gpus {options.gpus}: {missing}")
    out.mkdir(parents=True, exist_ok=True)
    unpack(options.archive, out)

    def after() -> None:
        finish()
        pack(options.archive, out)

    left_over = run(chosen, out, options.budget, after)
    after()
    if left_over:
        print(f"not done: {', '.join(left_over)}; the same command, with this --out or --archive, goes on", flush=True)
    return int(bool(left_over))

# SPDX-License-Identifier: Apache-2.0
"""Cases that run on every rank of a one-GPU start, and how one start runs many of them.

A case is a function of a :class:`World`. :func:`expect` decides together with the other ranks, so that a
failed expectation ends the case on all ranks and the next case can run in the same processes. Anything else
that is raised may have left the ranks out of step, so it ends the start; the cases after it run in another
one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import ub_dynamic as ubd
from ub_dynamic.testing.mps import CONTROL
from ub_dynamic.testing.te_layers import OVERLAPS, Overlap
from ub_dynamic.testing.te_world import World, quantization_modes, te_world, ub_cfgs_with_room

MODULES = ("cases_bits", "cases_guard", "cases_input", "cases_schedule", "cases_life", "cases_policy", "cases_dropin")
STARTS = 6  # so many starts for one number of ranks, then the rest is not run
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Case:
    """``tp``: with how many ranks; ``limit_s``: its process is ended after that, with every thread's stack."""

    name: str
    function: Callable[[World], None]
    tp: tuple[int, ...]
    limit_s: float


CASES: dict[str, Case] = {}
PATIENCE = float(os.environ.get("UB_DYNAMIC_TEST_PATIENCE", "1"))  # times the limits, where others use the GPU too
_notes: list[str] = []  # of the case under way


def case(*, tp: Sequence[int] = (2, 4), limit_s: float = 60.0) -> Callable[[Any], Any]:
    """Register a function as a case under its own name."""

    def register(function: Callable[[World], None]) -> Callable[[World], None]:
        CASES[function.__name__] = Case(function.__name__, function, tuple(tp), limit_s)
        return function

    return register


def load_cases() -> dict[str, Case]:
    """Every case, in the order in which they run."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    for module in MODULES:
        importlib.import_module(module)
    if importlib.util.find_spec("megatron") is not None:
        importlib.import_module("cases_megatron")
    return CASES


class Failed(AssertionError):
    """An expectation that failed, on every rank alike."""


def expect(world: World, condition: bool, text: object = "") -> None:
    """Fail on all ranks if ``condition`` is false on one; ``text`` of those ranks is the message."""
    said = world.gather(None if condition else f"{text}")
    wrong = {rank: answer for rank, answer in enumerate(said) if answer is not None}
    if wrong:
        raise Failed("; ".join(f"rank {rank}: {answer}" for rank, answer in wrong.items()))


def note(world: World, text: str) -> None:
    """Something that is no failure, and that one wants to read in the test's output."""
    if world.rank == 0:
        _notes.append(text)


def expect_raises(
    world: World, kind: type[BaseException], parts: Sequence[str], call: Callable[[], object], where: str = ""
) -> None:
    """``call`` raises exactly ``kind`` or a child of it, with every one of ``parts`` in its text."""
    problem = ""
    try:
        call()
        problem = f"nothing was raised, expected {kind.__name__}"
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        if missing:
            problem = f"{type(error).__name__} without {missing}: {error}"
    except Exception as error:
        problem = f"{type(error).__name__} instead of {kind.__name__}: {error}"
    gc.collect()  # the traceback held frames, and they hold communicators
    expect(world, not problem, f"{where}: {problem}" if where else problem)


@contextlib.contextmanager
def userbuffers(
    world: World,
    capacity: int,
    hidden: int,
    overlap: Overlap = OVERLAPS["default"],
    modes: Sequence[str] = ("none",),
    **options: Any,
) -> Iterator[ubd.Manager]:
    """Dynamic UserBuffers for one case."""
    manager = ubd.initialize_ub(
        [capacity, hidden],
        world.size,
        quantization_modes=quantization_modes(modes),
        dtype=options.pop("dtype", torch.bfloat16),
        ub_cfgs=ub_cfgs_with_room(world, overlap.ub_cfgs),
        bootstrap_backend="gloo",
        backend="te",
        **options,
    )
    try:
        yield manager
    except Failed:  # on every rank alike; after anything else the ranks are out of step and the process ends
        ubd.destroy_ub()
        raise
    world.barrier()
    ubd.destroy_ub()


# -- on the ranks
# ----------------------------------------------------------------------------------------------


def run_on_rank(names: Sequence[str], folder: Path) -> None:
    """Run the named cases; each rank writes its own results, a line a case, as they come."""
    cases = load_cases()
    with te_world(120.0) as world, open(folder / f"rank{world.rank}", "a", buffering=1) as results:
        for name in names:
            faulthandler.dump_traceback_later(PATIENCE * cases[name].limit_s, exit=True)
            _notes.clear()
            begin = time.perf_counter()
            together, error = True, ""
            try:
                cases[name].function(world)
            except Failed as failure:
                error = str(failure)
                together = _nothing_left()
            except BaseException:
                together, error = False, traceback.format_exc()
            gc.collect()
            faulthandler.cancel_dump_traceback_later()
            line = {"case": name, "error": error, "seconds": time.perf_counter() - begin, "notes": _notes}
            results.write(json.dumps(line) + "\n")
            if not together:
                os._exit(3)  # out of step: nothing that follows could be trusted, and a clean exit could hang
            world.barrier()


def _nothing_left() -> bool:
    """End the UserBuffers that a failed expectation left, on every rank alike, for the next case."""
    try:
        ubd.destroy_ub()
    except Exception:
        traceback.print_exc()
        return False
    return True


# -- in pytest
# -------------------------------------------------------------------------------------------------


@dataclass
class Result:
    error: str
    seconds: float
    notes: tuple[str, ...] = ()


def run_cases(tp: int, names: Sequence[str], folder: Path) -> dict[str, Result]:
    """Run the named cases on ``tp`` ranks of one GPU, in as few starts as possible."""
    cases = load_cases()
    found: dict[str, Result] = {}
    for attempt in range(STARTS):
        left = [name for name in names if name not in found]
        if not left:
            break
        here = folder / f"tp{tp}-start{attempt}"
        here.mkdir(parents=True)
        log = _start(tp, left, here, PATIENCE * sum(cases[name].limit_s for name in left) + 120.0)
        new = _read(tp, here)
        found.update(new)
        if not all(name in new for name in left):
            died = next((name for name in left if name not in new), left[0])
            if not any(result.error for result in new.values()) or died == left[0]:
                # no rank could say what happened: the case that was under way ended its process
                found[died] = Result(f"its process ended; the last lines were:\n{log[-6000:]}", 0.0)
    for name in names:
        found.setdefault(name, Result(f"not run: {STARTS} starts were used up by cases before it", 0.0))
    (folder / f"tp{tp}.json").write_text(json.dumps({k: asdict(v) for k, v in found.items()}, indent=1))
    return found


def _start(tp: int, names: Sequence[str], folder: Path, timeout_s: float) -> str:
    import shutil

    root = str(HERE.parents[1])
    mps = ["--mps"] if shutil.which(CONTROL) else []
    program = [sys.executable, "-W", "ignore", str(HERE / "harness.py"), str(folder), *names]
    launcher = [sys.executable, "-m", "ub_dynamic.cli.one_gpu", "-n", str(tp), *mps, "--timeout", str(timeout_s)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "UB_TIMEOUT": os.environ.get("UB_TIMEOUT", "20"),
    }
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen([*launcher, "--", *program], env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            _tell(process, tp, folder, timeout_s + 60)
        finally:
            process.terminate()  # it ends its ranks and its daemon
            process.wait(60)
        log.seek(0)
        return log.read()


def _tell(process: subprocess.Popen[bytes], tp: int, folder: Path, timeout_s: float) -> None:
    """Wait, and print every case as soon as its ranks are through with it, an error when the first rank has it."""
    told: set[str] = set()
    deadline = time.monotonic() + timeout_s
    ended = False
    while not ended and time.monotonic() < deadline:
        ended = process.poll() is not None
        for name, result in _read(tp, folder).items():
            if name not in told:
                told.add(name)
                print(f"tp{tp} {name}: {result.error or 'ok'} ({result.seconds:.1f} s)", *result.notes, sep="\n  ")
        sys.stdout.flush()
        time.sleep(0.5)


def _read(tp: int, folder: Path) -> dict[str, Result]:
    """What the ranks wrote; a case counts when every rank has written it, or one of them has an error."""
    ranks: list[dict[str, dict[str, Any]]] = []
    for rank in range(tp):
        path = folder / f"rank{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # whole lines
        ranks.append({record["case"]: record for record in map(json.loads, lines)})
    found = {}
    for name in dict.fromkeys(name for written in ranks for name in written):
        records = [written[name] for written in ranks if name in written]
        errors = dict.fromkeys(record["error"] for record in records if record["error"])
        if errors or len(records) == tp:
            notes = tuple(text for record in records for text in record["notes"])
            found[name] = Result("\n".join(errors), max(record["seconds"] for record in records), notes)
    return found


if __name__ == "__main__":
    # The cases import this file by its name; run that module, not a second copy of it.
    sys.path.insert(0, str(HERE))
    importlib.import_module("harness").run_on_rank(sys.argv[2:], Path(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""Every part of several_gpus.py and several_gpus_cp.py once, tiny, on ranks that share one GPU, or on CPU ranks.

    python benchmarks/rehearse.py --out /tmp/rehearsal --archive rehearsal.tar.gz
    python benchmarks/rehearse.py --on cpu                    what needs no GPU

4 minutes on an H200. What overlaps by UserBuffers runs one after another, since kernels of two such programs starve
each other (``_side_by_side.py``), and what does not runs beside it, since starting ranks takes most of the time.

The programs, their options and their order are those of a machine with several GPUs; what its plan cannot reach on one
GPU runs beside it: each peer once, without its time (te_peers.py), and torchrun with one rank (gpus_seen.py). What
ranks that share a GPU cannot compare has to be refused: a result with the time of NCCL, of async TP or of cuBLASMp is
an error here. Files end in ``_rehearsalN``, and say ``one-gpu-N-ranks``.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _parts
import several_gpus
import several_gpus_cp
from _parts import HERE, Part
from _side_by_side import find_gpus, shared_daemons

from ub_dynamic.modes import CPU_MPI, gpu_mode, shares_gpu
from ub_dynamic.testing.results import results_folder

APART = ("none", "async_tp", "cublasmp")  # what needs a GPU of its own for each rank
CP_WORDS = {
    "cp_step.py": ("--lengths", "four", "--shrink", "16"),
    "cp_comm.py": ("--lengths", "four", "padded", "--shrink", "16"),
    "attnres_step.py": ("--vpp", "2", "--hidden", "256"),
}
NONE = ("mismatches", "multicast", "outside_tolerance", "wrong", "wrong_sums")  # figures that have to be 0
SIZES: Mapping[str, Mapping[str, Any]] = {
    "te": {
        "hiddens": (1024,),
        "gemms": ("fc1_fprop", "fc2_fprop", "fc1_dgrad", "fc2_dgrad"),
        "tokens": "256,512",
        "steps": "512",
        "capacity": 1024,
        "tune_s": 12.0,
        "bits": 3,
        "operations": 60,
    },
    "host": {"hiddens": (64,), "tokens": "64,128", "steps": "64,128", "capacity": 128, "tune_s": 20.0},
}
SCALE = 0.04  # of all other seconds
BUDGET_S = 225.0
# What has run on one GPU for long: last.
KNOWN = ("te_bits", "te_stress", "tp_step_zeros")
BESIDE = (*(name for name, _, _ in several_gpus_cp.PROGRAMS.values()), "gpus_seen")  # without UserBuffers


def plan(ranks: int, backend: str, out: Path) -> list[Part]:
    """The parts of both plans, those that have not run elsewhere first."""
    parts = several_gpus.plan(setup_of(ranks, backend, out))
    if backend == "te":
        parts.insert(2, _beside("te_peers", out, "--tp", str(ranks)))
        parts += [_beside("gpus_seen", out, "--tp", "1", "--gpus")]
        parts += several_gpus_cp.plan(ranks, out, f"rehearsal{ranks}", SCALE, CP_WORDS)
    return sorted(parts, key=lambda part: part.name.startswith(KNOWN))


def setup_of(ranks: int, backend: str, out: Path) -> several_gpus.Setup:
    return several_gpus.Setup(ranks, backend, f"rehearsal{ranks}", out, scale=SCALE, apart=False, **SIZES[backend])


def mode_of(part: Part, ranks: int, backend: str) -> str:
    """What the result has to say."""
    if backend == "host":
        return CPU_MPI
    return gpu_mode(1, shared=False) if "--gpus" in part.words else gpu_mode(ranks, shared=True)


def _beside(program: str, out: Path, *more: str) -> Part:
    name = f"{program}_rehearsal"
    words = (str(HERE / f"{program}.py"), *more, "--timeout", "{limit}", "--name", name, "--out", str(out))
    return Part(name, words, 2.0, out / f"{name}.json", 1)


def wrong(part: Part, mode: str) -> list[str]:
    """What a result says that it must not say, in this mode or in any."""
    record = json.loads(part.writes.read_text())
    found = [] if record["mode"] == mode else [f"mode is {record['mode']}, not {mode}"]
    found += [f"{name} is {count}" for name in NONE if (count := record.get("figures", {}).get(name))]
    if shares_gpu(mode):
        found += [f"it has {name}" for name in sorted(set(_refused(record["rows"], is_timeless(part))))]
    return found


def _refused(rows: Sequence[Mapping[str, Any]], timeless: bool) -> Iterator[str]:
    """Fields of what has to be refused on a shared GPU; ``timeless``: every time is one of NCCL."""
    for row in rows:
        for name in row:
            peers = name.startswith(tuple(f"{arm}_" for arm in APART)) or name.endswith("_over_none")
            if peers or (timeless and (name.endswith("ms") or "over_" in name)):
                yield name
        for candidate in row.get("candidates", ()):
            if candidate["config"]["method"] == "none":
                yield f"a candidate {candidate['config']}"


def unsaid(part: Part, log: str) -> list[str]:
    """Comparisons that the program left out without a word."""
    if part.words[:2] != several_gpus.MODULE:
        arms: tuple[str, ...] = ("times",) if is_timeless(part) else ()
    else:
        arms = APART if "op" in part.words else ("none",) if "--arms" not in part.words else ()
    return [f"it does not say why {arm} is left out" for arm in arms if f"left out: {arm}" not in log]


def is_timeless(part: Part) -> bool:
    """Whether all times of the part are those of NCCL between ranks."""
    return any(Path(word).name in several_gpus_cp.PROGRAMS for word in part.words)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("gpu", "cpu"), default="gpu", help="ranks that share one GPU, or CPU ranks")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "rehearsal", help="of results and logs")
    parser.add_argument("--go-on", action="store_true", help="with what is in --out already")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of --out, made anew after each part")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--only", nargs="+", help="parts whose names begin so")
    parser.add_argument("--in-turn", action="store_true", help="nothing side by side")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and run nothing")
    options = parser.parse_args(arguments)
    backend, out = ("te" if options.on == "gpu" else "host"), options.out.resolve()
    if out.is_relative_to(results_folder().resolve()):
        parser.error(f"--out {out}: a rehearsal writes nothing into {results_folder()}")
    parts = plan(options.ranks, backend, out)
    parts = [part for part in parts if not options.only or part.name.startswith(tuple(options.only))]
    if options.dry_run:
        for part in parts:
            print(f"{part.name:24} {part.seconds:5.1f} s  python {' '.join(part.words)}")
        return 0
    if not options.go_on and out.exists() and any(out.iterdir()):
        parser.error(f"--out {out} is not empty: --go-on keeps what is done; or name another folder")
    out.mkdir(parents=True, exist_ok=True)
    if backend == "te":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return rehearse(parts, backend, out, options)


def run(parts: Sequence[Part], backend: str, out: Path, options: argparse.Namespace) -> list[str]:
    """All parts, those of :data:`BESIDE` beside the others; the names of those that are not done."""
    lock = threading.Lock()

    def after() -> None:
        with lock:
            _parts.pack(options.archive, out)

    beside = [part for part in parts if part.name.startswith(BESIDE) and not options.in_turn]
    lanes = [beside, [part for part in parts if part not in beside]]
    gpus = find_gpus() if backend == "te" else []
    with shared_daemons(gpus), ThreadPoolExecutor(len(lanes)) as pool:
        for gpu in gpus:
            os.environ.update(gpu.daemon)
        ended = [pool.submit(_parts.run, lane, out, options.budget, after) for lane in lanes]
        return [name for each in ended for name in each.result()]


def rehearse(parts: Sequence[Part], backend: str, out: Path, options: argparse.Namespace) -> int:
    """Run all, then say what is wrong with what they wrote."""
    bad = run(parts, backend, out, options)
    several_gpus.merge_ops(setup_of(options.ranks, backend, out))
    for part in parts:
        if part.name in bad:
            continue
        found = wrong(part, mode_of(part, options.ranks, backend))
        if backend == "te":
            found += unsaid(part, (out / f"{part.name}.log").read_text())
        for text in found:
            print(f"{part.name}: {text}", flush=True)
        bad += [part.name] if found else []
    _parts.pack(options.archive, out)
    print(f"rehearsal: {len(parts) - len(bad)} of {len(parts)} parts are right", *(f"; not {name}" for name in bad))
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())

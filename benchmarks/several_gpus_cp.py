# SPDX-License-Identifier: Apache-2.0
"""Context parallelism and pipelines with one rank a GPU: packed attention's flag and patches, every way to split it
against the chooser's pick, and the block cache of attention residuals.

    python benchmarks/several_gpus_cp.py --gpus 4             the plan below, in 10 minutes
    python benchmarks/several_gpus_cp.py --gpus 4 --dry-run   only say what would run, with seconds
    python benchmarks/several_gpus_cp.py --gpus 4 --shared    all ranks on one GPU: everything but times

Writes cp_te_xN.json, cp_hierarchical_xN.json and attnres_xN.json; a part whose file is there is not run again. NVLink
multicast stays off, as in several_gpus.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from several_gpus import GRACE_S, HERE, START_S, Part, pack, run

from ub_dynamic.testing.results import results_folder

# Program -> the result file's name, and the seconds to measure in.
PROGRAMS = {
    "cp_step.py": ("cp_te", 120.0),
    "cp_comm.py": ("cp_hierarchical", 150.0),
    "attnres_step.py": ("attnres", 100.0),
}


def plan(gpus: int, out: Path, shared: bool, scale: float) -> list[Part]:
    """Every part, the most important first."""
    parts = []
    for program, (result, seconds) in PROGRAMS.items():
        name = f"{result}_{'shared' if shared else 'x'}{gpus}"
        scaled = seconds * scale
        words = (
            str(HERE / program), "--tp", str(gpus), "--seconds", f"{scaled:g}", "--name", name, "--out", str(out),
            "--timeout", f"{scaled + GRACE_S:g}", *(() if shared else ("--gpus",)),
        )  # fmt: skip
        parts.append(Part(name, words, scaled, out / f"{name}.json"))
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, choices=(2, 4, 8), help="ranks, one a GPU: cp and pp")
    parser.add_argument("--shared", action="store_true", help="all ranks on one GPU: a dry run of everything but times")
    parser.add_argument("--out", type=Path, default=None, help="folder of result files and logs")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the folder, made anew after each part")
    parser.add_argument("--budget", type=float, default=600, help="seconds for everything")
    parser.add_argument("--scale", type=float, default=1.0, help="of the seconds to measure in")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, with seconds, and run nothing")
    options = parser.parse_args(arguments)
    out = (options.out or results_folder()).resolve()
    parts = plan(options.gpus, out, options.shared, options.scale)
    if options.dry_run:
        for part in parts:
            print(f"{part.name:24} {START_S + part.seconds:5.0f} s  python {' '.join(part.words)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    return int(bool(run(parts, out, options.budget, lambda: pack(options.archive, out))))


if __name__ == "__main__":
    raise SystemExit(main())

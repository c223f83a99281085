# SPDX-License-Identifier: Apache-2.0
"""Context parallelism and pipelines with one rank a GPU: packed attention's flag and patches, every way to split it
against the chooser's pick, and the block cache of attention residuals.

Writes cp_te_x2.json, cp_hierarchical_x2.json and attnres_x2.json (_x4, _x8). A part whose file is whole is not run
again. NVLink multicast stays off, as in several_gpus.py.

    python benchmarks/several_gpus_cp.py --gpus 4 --dry-run   only say what would run, with seconds

On a machine that takes commands of 600 s and keeps nothing between two machines, from the root of the checkout, with
Transformer Engine's environment and UB_DYNAMIC_COMMIT; for 2 and 8 GPUs the same with --gpus 2 (x2) and --gpus 8 (x8):

    1.  python benchmarks/several_gpus_cp.py --gpus 4 --out /tmp/cp4 --archive $OUT/cp4.tar.gz

$OUT is the folder whose files come back. One command, 8 minutes, reaches everything. What it could not do the same one
does once more, after ``cp carried/cp4.tar.gz $OUT/``, the archive that the first has brought back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import _parts
from _parts import HERE, Part

from ub_dynamic.testing.results import results_folder

# Program -> the result file's name, the seconds to measure in, and the rows of the whole result.
PROGRAMS = {
    "cp_step.py": ("cp_te", 120.0, 6),
    "cp_comm.py": ("cp_hierarchical", 150.0, 1),
    "attnres_step.py": ("attnres", 100.0, 2),
}


def plan(
    ranks: int, out: Path, suffix: str, scale: float = 1.0, more: Mapping[str, Sequence[str]] | None = None
) -> list[Part]:
    """Every part, the most important first. ``more``: words for a program; without them one rank a GPU."""
    parts = []
    for program, (result, seconds, rows) in PROGRAMS.items():
        name, scaled = f"{result}_{suffix}", seconds * scale
        beside = ("--gpus",) if more is None else more[program]
        words = (
            str(HERE / program), "--tp", str(ranks), "--seconds", f"{scaled:g}", "--name", name, "--out", str(out),
            "--timeout", "{limit}", *beside,
        )  # fmt: skip
        parts.append(Part(name, words, scaled, out / f"{name}.json", rows if more is None else 1))
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parts.options_of(__doc__)
    options = parser.parse_args(arguments)
    out = (options.out or results_folder()).resolve()
    return _parts.main(parser, options, plan(options.gpus, out, f"x{options.gpus}"), out)


if __name__ == "__main__":
    raise SystemExit(main())

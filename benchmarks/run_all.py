# SPDX-License-Identifier: Apache-2.0
"""Run every benchmark that needs no GPU, one after the other, then write the tables made from them.

A benchmark is a program of this folder; helpers begin with `_`. Those for GPUs say so in their names (`te_`, `gpu`,
`gpus`) or start their ranks with `_one_gpu`.
Each starts its own ranks, writes its own result file and says in its docstring what it measures.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = ("run_all.py", "make_tables.py", "draw_steps.py")


def programs() -> list[Path]:
    """The benchmarks that need no GPU, by name."""
    found = (path for path in sorted(HERE.glob("*.py")) if path.name not in TOOLS and not path.name.startswith("_"))
    return [path for path in found if not _needs_gpu(path)]


def _needs_gpu(path: Path) -> bool:
    return bool({"te", "gpu", "gpus"} & set(path.stem.split("_"))) or "import _one_gpu" in path.read_text()


def main() -> int:
    failed = []
    for program in [*programs(), HERE / "make_tables.py"]:
        print(f"== {program.name}", flush=True)
        if subprocess.run([sys.executable, str(program)], check=False).returncode != 0:
            failed.append(program.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

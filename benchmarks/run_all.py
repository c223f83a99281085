# SPDX-License-Identifier: Apache-2.0
"""Run every benchmark that needs no GPU, one after the other, then write the tables made from them.

A benchmark is a program of this folder; those for a GPU have `te_` or `gpu` in their names, helpers begin with `_`.
Each starts its own ranks, writes its own result file and says in its docstring what it measures.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = ("run_all.py", "make_tables.py")


def programs() -> list[Path]:
    """The benchmarks that need no GPU, by name."""
    return [
        path
        for path in sorted(HERE.glob("*.py"))
        if path.name not in TOOLS and not path.name.startswith("_") and not {"te", "gpu"} & set(path.stem.split("_"))
    ]


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

# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks that need no GPU, one after the other, then write the tables of benchmarks/README.md.

Those for a GPU (their names begin with `te_`) are run by hand; each says how in its docstring.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ub_dynamic.testing.launch import run_ranks

HERE = Path(__file__).resolve().parent
# file -> ranks, 0 for an ordinary process
CPU_BENCHMARKS: dict[str, int] = {}
TIMEOUT_S = 3600.0


def main() -> int:
    failed = [name for name, ranks in CPU_BENCHMARKS.items() if run(HERE / name, ranks) != 0]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, str(HERE / "make_tables.py")], check=False).returncode


def run(program: Path, ranks: int) -> int:
    print(f"== {program.name}" + f" on {ranks} ranks" * (ranks > 0), flush=True)
    if ranks == 0:
        return subprocess.run([sys.executable, str(program)], check=False, timeout=TIMEOUT_S).returncode
    result = run_ranks(program, ranks, timeout=TIMEOUT_S)
    print(result.stdout, result.stderr, flush=True)
    return result.returncode


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""What set_ub_active_shape costs on 12 host communicators, another T each time. Writes host_set_shape.json.

python benchmarks/set_shape.py --calls 1000000
"""

from __future__ import annotations

import argparse

from ub_dynamic.bench.set_shape import figures
from ub_dynamic.bench.start import run
from ub_dynamic.testing.results import write_result

TP = 2


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--calls", type=int, default=1_000_000)
    calls = options.parse_args().calls
    ended = run({"bench": "set-shape", "options": {"calls": calls}}, "host", TP, timeout_s=1200)
    if ended.status:
        raise SystemExit(f"the ranks ended with status {ended.status}\n{ended.output}")
    made = figures(ended.rows)
    for key, value in made.items():
        print(f"{key}: {value:g}")
    write_result("host_set_shape", made, mode="cpu-mpi")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

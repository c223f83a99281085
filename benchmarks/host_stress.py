# SPDX-License-Identifier: Apache-2.0
"""Random operations on one set of host buffers, bit by bit against exact ones. Writes host_stress.json.

python benchmarks/host_stress.py --tp 2 4
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

import _host_ranks

from ub_dynamic.groups import Group
from ub_dynamic.testing import host_stress
from ub_dynamic.testing.results import write_result


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    options.add_argument("--operations", type=int, default=4000, help="for each tp")
    options.add_argument("--seed", type=int, default=11)
    chosen = options.parse_args()

    def measure(group: Group) -> dict[str, Any]:
        begin = time.perf_counter()
        outcome = host_stress.run(group, chosen.operations, chosen.seed)
        return {"tp": group.size, **asdict(outcome), "seconds": time.perf_counter() - begin}

    if _host_ranks.is_rank():
        _host_ranks.answer(chosen.tp[0], measure)
        return 0
    arguments = ["--operations", str(chosen.operations), "--seed", str(chosen.seed)]
    rows = [_host_ranks.ask(__file__, tp, arguments, timeout=1200) for tp in chosen.tp]
    for row in rows:
        print(row)
    figures = {f"operations_tp{row['tp']}": row["operations"] for row in rows}
    figures |= {key: sum(row[key] for row in rows) for key in ("mismatches", "shape_changes", "allocations")}
    write_result("host_stress", figures, rows, mode="cpu-mpi")
    return 1 if figures["mismatches"] or figures["allocations"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""Bits: host communicators of capacity C with active T against those made for exactly T. Writes
host_bits.json.

python benchmarks/host_bits.py --tp 2 4
"""

from __future__ import annotations

import argparse

import _host_ranks

from ub_dynamic.groups import Group
from ub_dynamic.testing.host_bits import COMMUNICATORS, case_backend, random_cases, run_case
from ub_dynamic.testing.host_layer_bits import random_layer_cases, run_layer_case
from ub_dynamic.testing.results import write_result


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    options.add_argument("--cases", type=int, default=300, help="for each communicator and tp")
    options.add_argument("--layer-cases", type=int, default=24, help="for each tp, four T each")
    options.add_argument("--seed", type=int, default=7)
    chosen = options.parse_args()

    def measure(group: Group) -> dict[str, tuple[int, int]]:
        return count_mismatches(group, chosen.cases, chosen.layer_cases, chosen.seed)

    if _host_ranks.is_rank():
        _host_ranks.answer(chosen.tp[0], measure)
        return 0
    rows = []
    arguments = ["--cases", chosen.cases, "--layer-cases", chosen.layer_cases, "--seed", chosen.seed]
    for tp in chosen.tp:
        answer = _host_ranks.ask(__file__, tp, list(map(str, arguments)), timeout=1200)
        for what, (cases, mismatches) in answer.items():
            rows.append({"tp": tp, "communicator": what, "cases": cases, "mismatches": mismatches})
            print(f"tp {tp} {what}: {cases} cases, {mismatches} mismatches")
    figures = {key: sum(row[key] for row in rows) for key in ("cases", "mismatches")}
    write_result("host_bits", figures, rows, mode="cpu-mpi")
    return 1 if figures["mismatches"] else 0


def count_mismatches(group: Group, cases: int, layer_cases: int, seed: int) -> dict[str, tuple[int, int]]:
    """Run everything; for each communicator and the layers: how many cases, and how many were wrong somewhere.

    Each rank prints the differences that it saw. Collective.
    """
    backend = case_backend(group)
    results = {}
    for method, collective in COMMUNICATORS:
        wrong = 0
        for case in random_cases(method, collective, group.size, cases, seed):
            wrong += _anywhere(group, run_case(backend, method, collective, case))
        results[f"{method} {collective}"] = (cases, wrong)
    backend.destroy()
    wrong = 0
    for layer_case in random_layer_cases(group.size, layer_cases, seed):
        wrong += _anywhere(group, run_layer_case(group, layer_case))
    results["layers"] = (layer_cases, wrong)
    return results


def _anywhere(group: Group, texts: list[str]) -> bool:
    for text in texts:
        print(f"rank {group.rank}: {text}")
    return any(group.allgather(bool(texts), "comparing results"))


if __name__ == "__main__":
    raise SystemExit(main())

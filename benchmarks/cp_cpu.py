# SPDX-License-Identifier: Apache-2.0
"""Hierarchical attention on CPU ranks in float64 against dense attention, sequence by sequence. Writes cp_cpu.json.

    python benchmarks/cp_cpu.py

On 4 and 8 processes over gloo: every (a2a, p2p), grouped-query attention, both masks, every partition, and random
lengths. Errors are the largest absolute ones of out, dq, dk and dv over all rows and ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ub_dynamic.cp.partition import Partition
from ub_dynamic.testing.attention import Case, errors_against_dense, hierarchical_groups
from ub_dynamic.testing.launch import run_ranks
from ub_dynamic.testing.results import write_result

_ROWS = "UB_DYNAMIC_BENCH_ROWS"
INNER = {4: (1, 2, 4), 8: (1, 2, 4, 8)}
TOLERANCE = 1e-10


def cases(cp: int, random_cases: int) -> Iterator[Case]:
    """The chosen cases, then random ones, the same on every rank."""
    for lengths in (
        (13, 40, 7, 1, 0),
        (16 * cp, 2 * cp, 4 * cp),
        (1,),
        (0, 5, 0),
        (301, *[3] * 20, 1, 1, 0, 17),
        (2 * cp - 1, 2 * cp + 1),
    ):
        for causal in (True, False):
            yield Case(lengths, heads=8, groups=8, causal=causal)
            yield Case(lengths, heads=8, groups=2, causal=causal, tail="extend_last", align=16)
        yield Case(
            lengths, heads=8, groups=4, causal=False, partition=Partition.contiguous(), tail="ghost_padding", align=8
        )
    grid = Partition.grid2d(2 * cp, 4)
    yield Case((8 * cp, 16 * cp), heads=8, groups=8, causal=False, partition=grid)
    draw = random.Random(cp)
    for _ in range(random_cases):
        lengths = tuple(
            draw.choice((0, 1, 2, draw.randrange(60), draw.randrange(200))) for _ in range(draw.randrange(1, 9))
        )
        if any(lengths):
            groups = draw.choice((1, 2, 4, 8))
            yield Case(lengths, heads=8, groups=groups, size=draw.choice((4, 8)), causal=draw.random() < 0.6)


def custom(case: Case, cp: int) -> Case:
    """The case with random rows of every sequence for every rank."""
    batch = case.batch(cp)
    draw = random.Random(len(case.lengths))
    rows: list[list[int]] = [[] for _ in range(cp)]
    for start, length in zip(batch.cu_seqlens_padded, batch.padded, strict=False):
        shuffled = list(range(start, start + length))
        draw.shuffle(shuffled)
        for rank in range(cp):
            rows[rank] += shuffled[rank::cp]
    return Case(**{**vars(case), "causal": False, "partition": Partition.custom(rows)})


def measure(random_cases: int) -> None:
    dist.init_process_group("gloo")
    cp, first = dist.get_world_size(), dist.get_rank() == 0
    with open(os.environ[_ROWS], "a", buffering=1) as file:
        for inner in INNER[cp]:
            groups = hierarchical_groups(inner)
            every = list(cases(cp, random_cases))
            for case in [*every, *(custom(case, cp) for case in every[:6])]:
                found = errors_against_dense(case, *groups)
                row = {
                    "ranks": cp,
                    "a2a": inner,
                    "p2p": cp // inner,
                    "lengths": list(case.lengths),
                    "heads": case.heads,
                    "groups": case.groups,
                    "causal": case.causal,
                    "partition": case.partition.name,
                    **found,
                }
                if first:
                    file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    worst = {name: max(row[name] for row in rows) for name in ("out", "dq", "dk", "dv", "padding")}
    return {
        "cases": len(rows),
        "max_abs_error": max(worst[name] for name in ("out", "dq", "dk", "dv")),
        "max_padding": worst.pop("padding"),
        **{f"max_abs_error_{name}": error for name, error in worst.items()},
        "failed": sum(max(row[name] for name in worst) > TOLERANCE or row["padding"] > 0 for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], choices=INNER)
    parser.add_argument("--random", type=int, default=60, help="random cases for each (a2a, p2p)")
    parser.add_argument("--out", type=Path, default=None, help="folder of the result file")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each start")
    options = parser.parse_args()
    if _ROWS in os.environ:
        measure(options.random)
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            path = Path(folder, f"rows{ranks}")
            done = run_ranks(
                __file__,
                ranks,
                ["--random", str(options.random)],
                timeout=options.timeout,
                env={_ROWS: str(path)},
                launcher="torchrun",
            )
            done.check()
            rows += [json.loads(line) for line in path.read_text().splitlines()]
    made = figures(rows)
    write_result("cp_cpu", made, rows, mode="cpu-mpi", folder=options.out)
    print("cp_cpu", json.dumps(made))
    return int(made["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())

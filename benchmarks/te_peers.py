# SPDX-License-Identifier: Apache-2.0
"""Every peer of ``bench op`` runs, forward and backward, and async TP computes what NCCL and a GEMM do: no times, so
that ranks may share a GPU. Writes te_peers.json.

python benchmarks/te_peers.py --tp 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _one_gpu
import torch.distributed as dist
from _cp import relative_error

from ub_dynamic.bench.operations import GEMMS, Gemm
from ub_dynamic.bench.peers import PEERS, AsyncTP, Setting
from ub_dynamic.bench.subject import register
from ub_dynamic.bench.worlds import TEWorld
from ub_dynamic.modes import gpu_mode
from ub_dynamic.overlap import OverlapConfig

TOLERANCE = 1e-2  # of BF16 sums in another order, relative to the norm


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    te = TEWorld(world, gpu_mode(world.size, shared=False))  # asks for what each peer needs beside GPUs of its own
    hidden, capacity = options.hidden, options.capacity
    none = OverlapConfig("none")
    manager, refused = register(te, capacity, hidden, {gemm: [none] for gemm in GEMMS})
    for gemm in GEMMS.values():
        setting = Setting(te, manager, gemm, hidden, 4 * hidden, capacity)
        for name, peer in PEERS.items():
            row: dict[str, Any] = {"peer": name, "gemm": gemm.name, "ran": 0}
            reason = refused.get((gemm.name, none)) if name == "none" else peer.available(te, gemm)
            if reason is not None:
                add({**row, "left_out": reason})
                continue
            arm = peer.make(setting)
            for tokens in (capacity, capacity // 2):
                manager.set_active_shape((tokens, hidden))
                arm.block(tokens, 1)
            row["ran"] = 1
            if isinstance(arm, AsyncTP) and not gemm.backward:
                errors = [async_tp_error(te, gemm, arm, tokens) for tokens in (capacity, capacity // 2)]
                row["rel_error"] = max(world.gather(max(errors)))
            world.barrier()
            arm.close()
            add(row)
            if world.rank == 0:
                print(row, flush=True)
    te.destroy()


def async_tp_error(world: TEWorld, gemm: Gemm, arm: AsyncTP, tokens: int) -> float:
    """Of the fused operation against the collective and the GEMM apart."""
    operand, weight = arm.operands(tokens)
    group = world.world.tp_group
    if gemm.column:
        whole = operand.new_empty((tokens, operand.shape[1]))
        dist.all_gather_into_tensor(whole, operand, group=group)
        return relative_error([arm.forward(operand)], [whole @ weight.t()])
    wanted = operand.new_empty((tokens // world.size, weight.shape[0]))
    dist.reduce_scatter_tensor(wanted, operand @ weight.t(), group=group)
    return relative_error([arm.forward(operand)], [wanted])


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    errors = [row["rel_error"] for row in rows if "rel_error" in row]
    made: dict[str, float] = {
        "ran": sum(row["ran"] for row in rows),
        "left_out": sum("left_out" in row for row in rows),
    }
    made |= {f"ran_{peer}": sum(row["ran"] for row in rows if row["peer"] == peer) for peer in PEERS}
    return {**made, "rel_error_max": max(errors, default=0.0), "wrong": sum(error > TOLERANCE for error in errors)}


def main() -> int:
    made = _one_gpu.parser(__doc__, tp=(2,), timeout=120)
    made.add_argument("--hidden", type=int, default=1024)
    made.add_argument("--capacity", type=int, default=1024)
    made.add_argument("--name", default="te_peers", help="name of the result file")
    options = made.parse_args()
    return _one_gpu.main(options.name, options, measure, figures)


if __name__ == "__main__":
    sys.exit(main())

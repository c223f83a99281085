# SPDX-License-Identifier: Apache-2.0
"""What each rank sees of its machine: its GPU, which other GPUs it reaches, its environment, a sum over all ranks.

python benchmarks/gpus_seen.py --tp 2 --gpus

The first thing to run on a machine of several GPUs; writes gpus_seen.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _one_gpu
import torch
import torch.distributed as dist

VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "UB_SKIPMC",
)  # fmt: skip


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    here = torch.cuda.current_device()
    others = [index for index in range(torch.cuda.device_count()) if index != here]
    summed = torch.full((1024,), float(world.rank + 1), device=world.device)
    dist.all_reduce(summed)
    mine = {
        "rank": world.rank,
        "device": here,
        "gpu": torch.cuda.get_device_name(here),
        "reaches": sum(torch.cuda.can_device_access_peer(here, index) for index in others),
        "wrong_sums": int((summed != world.size * (world.size + 1) / 2).sum()),
        "processors": len(os.sched_getaffinity(0)),
        **{name: os.environ.get(name, "") for name in VARIABLES},
    }
    for row in world.gather(mine):
        add(row)


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``gpus``: different ones; ``reached``: by the rank that reaches the fewest others; ``multicast``: ranks in which
    it is not switched off."""
    return {
        "ranks": len(rows),
        "gpus": len({row["device"] for row in rows}),
        "reached": min(row["reaches"] for row in rows),
        "wrong_sums": sum(row["wrong_sums"] for row in rows),
        "multicast": sum((row["UB_SKIPMC"], row["NCCL_NVLS_ENABLE"]) != ("1", "0") for row in rows),
    }


def main() -> int:
    made = _one_gpu.parser(__doc__, tp=(2,), timeout=60)
    made.add_argument("--name", default="gpus_seen", help="name of the result file")
    options = made.parse_args()
    return _one_gpu.main(options.name, options, measure, figures)


if __name__ == "__main__":
    sys.exit(main())

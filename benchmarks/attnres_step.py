# SPDX-License-Identifier: Apache-2.0
"""Attention residuals over a pipeline of GPUs, with and without the block cache: step time, bytes, memory.

    python benchmarks/attnres_step.py --tp 4

``--tp`` ranks are the stages' ranks, one a GPU; on a shared GPU the times mean nothing. Writes attnres_step.json. Both
ways take turns, step by step, on the same ranks with the same weights; T differs in every microbatch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _one_gpu
import torch

from ub_dynamic.bench.interleave import interleaved, no_collection, ratio
from ub_dynamic.pipeline import PipelineRunner, PipelineTransport
from ub_dynamic.testing.pipeline_cases import Case, batches_of, on_the_wire, rank_runner

ARMS = {"plain": False, "cached": True}
TOKENS = (2048, 4096, 1024, 3072, 512, 4096, 2560, 1536)
DOCUMENT = 512
SUBLAYERS = 2  # of a chunk


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    end = time.monotonic() + options.seconds
    for index, vpp in enumerate(options.vpp):
        row = one_depth(world, options, vpp, time.monotonic() + (end - time.monotonic()) / (len(options.vpp) - index))
        add(row)
        if world.rank == 0:
            print(row, flush=True)


def case_of(pp: int, vpp: int, blocks: int) -> Case:
    """As many blocks as wanted, or one less, over ``pp * vpp`` chunks of :data:`SUBLAYERS` sublayers."""
    total = pp * vpp * SUBLAYERS
    lengths = tuple((DOCUMENT,) * (tokens // DOCUMENT) for tokens in TOKENS)
    return Case(pp, (SUBLAYERS,) * (pp * vpp), -(-total // min(blocks, total)), lengths)


def one_depth(world: Any, options: argparse.Namespace, vpp: int, until: float) -> dict[str, Any]:
    case = case_of(world.size, vpp, options.blocks)
    config = case.config(
        hidden=options.hidden, heads=options.hidden // 128, ffn=4 * options.hidden, vocab=4096, dtype=torch.bfloat16,
        device=str(world.device),
    )  # fmt: skip
    batches = batches_of(case, config)
    row: dict[str, Any] = {"vpp": vpp, "blocks": options.blocks, "hidden": options.hidden}
    runners: dict[str, PipelineRunner] = {}
    transports: list[PipelineTransport] = []
    for arm, cache in ARMS.items():
        capacity = (max(case.tokens), config.hidden)
        transport = PipelineTransport(
            capacity=capacity, dtype=config.dtype, device=world.device, timeout_s=options.patience
        )
        transports.append(transport)
        runners[arm], _ = rank_runner(case, config, transport, cache=cache)
        torch.cuda.reset_peak_memory_stats()
        result = runners[arm].step(batches)
        torch.cuda.synchronize()
        wire = on_the_wire(transport, result)
        peaks = world.gather((torch.cuda.max_memory_allocated(), result.memory.store_peak_bytes))
        row[f"{arm}_wire_bytes"] = sum(wire.tensor_bytes.values())
        row[f"{arm}_blocks_sent"] = sum(wire.blocks.values())
        row[f"{arm}_peak_bytes"], row[f"{arm}_store_peak_bytes"] = (max(values) for values in zip(*peaks, strict=True))

    def block(arm: str, steps: int) -> float:
        world.barrier()
        with no_collection():
            begin = time.perf_counter()
            for _ in range(steps):
                runners[arm].step(batches)
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - begin) / steps

    taken = interleaved(tuple(ARMS), block, world.gather, until, block_ms=0.0, least_steps=2)
    for arm in ARMS:
        row[f"{arm}_ms"] = statistics.median(taken[arm])
    row["cached_over_plain"], row["interval"] = ratio(taken["cached"], taken["plain"])
    row["steps"] = 2 * len(taken["plain"])
    world.meet()
    for transport in transports:
        transport.close()
    return row


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    made: dict[str, float] = {"depths": len(rows)}
    for row in rows:
        for name in ("cached_over_plain", "plain_ms", "cached_ms", "plain_wire_bytes", "cached_wire_bytes"):
            made[f"{name}_vpp{row['vpp']}"] = row[name]
    return made


def main() -> int:
    made = _one_gpu.timed_parser("attnres_step", __doc__, seconds=80, timeout=240)
    made.add_argument("--vpp", type=int, nargs="+", default=[2, 4])
    made.add_argument("--hidden", type=int, default=2048)
    made.add_argument("--blocks", type=int, default=8)
    made.add_argument("--patience", type=float, default=40, help="seconds that a rank waits for another one")
    options = made.parse_args()
    return _one_gpu.main(options.name, options, measure, figures)


if __name__ == "__main__":
    sys.exit(main())

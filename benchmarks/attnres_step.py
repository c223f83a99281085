# SPDX-License-Identifier: Apache-2.0
"""Attention residuals over a pipeline of GPUs, with and without the block cache: step time, bytes, memory.

    python benchmarks/attnres_step.py --tp 4

``--tp`` ranks are the stages' ranks, one a GPU; of a shared GPU no times are kept. Writes attnres_step.json. Both ways
take turns, step by step, on the same ranks with the same weights; T differs in every microbatch. Their memory is
measured before, with nothing of the other way there.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # transfers beside kernels; 1 is for TP overlap

import _one_gpu
import torch

from ub_dynamic.bench.interleave import Gather, interleaved, no_collection, ratio
from ub_dynamic.bench.worlds import TEWorld
from ub_dynamic.pipeline import PipelineRunner, PipelineTransport
from ub_dynamic.testing.attnres import AttnResConfig, TokenBatch
from ub_dynamic.testing.pipeline_cases import Case, batches_of, on_the_wire, rank_runner

ARMS = {"plain": False, "cached": True}
TOKENS = (2048, 4096, 1024, 3072, 512, 4096, 2560, 1536)
DOCUMENT = 512
SUBLAYERS = 2  # of a chunk


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    end, timing = time.monotonic() + options.seconds, _one_gpu.timing_world(world)
    for index, vpp in enumerate(options.vpp):
        until = time.monotonic() + (end - time.monotonic()) / (len(options.vpp) - index)
        row = one_depth(timing, options, vpp, until) | _one_gpu.connections()
        add(row)
        if world.rank == 0:
            print(row, flush=True)


def case_of(pp: int, vpp: int, blocks: int) -> Case:
    """As many blocks as wanted, or one less, over ``pp * vpp`` chunks of :data:`SUBLAYERS` sublayers."""
    total = pp * vpp * SUBLAYERS
    lengths = tuple((DOCUMENT,) * (tokens // DOCUMENT) for tokens in TOKENS)
    return Case(pp, (SUBLAYERS,) * (pp * vpp), -(-total // min(blocks, total)), lengths)


def one_depth(world: TEWorld, options: argparse.Namespace, vpp: int, until: float) -> dict[str, Any]:
    case = case_of(world.size, vpp, options.blocks)
    config = case.config(
        hidden=options.hidden, heads=options.hidden // 128, ffn=4 * options.hidden, vocab=4096, dtype=torch.bfloat16,
        device=str(world.world.device),
    )  # fmt: skip
    batches = batches_of(case, config)
    row: dict[str, Any] = {"vpp": vpp, "blocks": options.blocks, "hidden": options.hidden}

    def pipeline(arm: str) -> Pipeline:
        return Pipeline(case, config, ARMS[arm], options.patience)

    for arm, told in in_turns(pipeline, batches, world.gather).items():
        row |= {f"{arm}_{name}": value for name, value in told.items()}
    pipelines = {arm: pipeline(arm) for arm in ARMS}

    def block(arm: str, steps: int) -> float:
        world.meet()
        with no_collection():
            begin = time.perf_counter()
            for _ in range(steps):
                pipelines[arm].runner.step(batches)
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - begin) / steps

    taken = interleaved(tuple(ARMS), block, world.gather, until, block_ms=0.0, least_steps=2)
    times: dict[str, Any] = {f"{arm}_ms": statistics.median(taken[arm]) for arm in ARMS}
    times |= ratio(taken["cached"], taken["plain"]).fields("cached_over_plain")
    world.meet()
    for each in pipelines.values():
        each.close()
    return row | _one_gpu.times(world, {**times, "steps": 2 * len(taken["plain"])})


class Pipeline:
    """This rank's part of the model in one way, and its transport."""

    def __init__(self, case: Case, config: AttnResConfig, cache: bool, patience: float) -> None:
        self.transport = PipelineTransport(
            capacity=(max(case.tokens), config.hidden),
            dtype=config.dtype,
            device=torch.device(config.device),
            timeout_s=patience,
        )
        self.runner: PipelineRunner = rank_runner(case, config, self.transport, cache=cache)[0]

    def close(self) -> None:
        self.transport.close()


def in_turns(
    pipeline: Callable[[str], Pipeline], batches: Sequence[TokenBatch], gather: Gather
) -> dict[str, dict[str, int]]:
    """Of each arm the bytes on the wire, and the memory that it takes on the rank that it takes most of.

    An arm stands alone, and in the second of two turns: what the device's libraries take once is in the first.
    """
    found: dict[str, dict[str, int]] = {}
    for arm in (*ARMS, *ARMS):
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = pipeline(arm)
        result = made.runner.step(batches)
        torch.cuda.synchronize()
        wire = on_the_wire(made.transport, result)
        peaks = gather((torch.cuda.max_memory_allocated() - before, result.memory.store_peak_bytes))
        peak, store = (max(values) for values in zip(*peaks, strict=True))
        found[arm] = {
            "wire_bytes": sum(wire.tensor_bytes.values()),
            "blocks_sent": sum(wire.blocks.values()),
            "peak_bytes": peak,
            "store_peak_bytes": store,
        }
        made.close()
        del made, result
    return found


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    made: dict[str, float] = {"depths": len(rows)}
    for row in rows:
        names = ("cached_over_plain", *(f"{arm}_{what}" for what in ("ms", "wire_bytes", "peak_bytes") for arm in ARMS))
        made |= {f"{name}_vpp{row['vpp']}": row[name] for name in names if name in row}
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

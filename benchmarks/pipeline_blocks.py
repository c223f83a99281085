# SPDX-License-Identifier: Apache-2.0
"""Attention residuals over a pipeline, with and without the block cache of a rank: bytes, step time, memory. Writes
pipeline_blocks.json and a picture beside it.

python benchmarks/pipeline_blocks.py --pp 4 --vpp 4 --blocks 8 --tokens 256 1024 512 768

The two ways take turns, step by step, on the same ranks. Times on one machine say what the bytes cost there, not
what a network would make of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import _host_ranks
import _pipeline
import torch

from ub_dynamic.groups import Group
from ub_dynamic.pipeline import PipelineTransport, StepResult
from ub_dynamic.ranks import discover
from ub_dynamic.testing.attnres import AttnResConfig
from ub_dynamic.testing.pipeline_cases import Case, batches_of, on_the_wire, rank_runner
from ub_dynamic.testing.results import results_folder, write_result

MODES = {False: "plain", True: "cached"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4, help="ranks of the pipeline (default: 4)")
    parser.add_argument("--vpp", type=int, default=4, help="chunks of the model on a rank (default: 4)")
    parser.add_argument(
        "--blocks", type=int, default=8, help="blocks of the model, the embedding included (default: 8)"
    )
    parser.add_argument("--sublayers", type=int, default=1, help="sublayers of a chunk (default: 1)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 320, 128, 512, 192, 448, 256, 384])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each way, after one that warms up")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for everything")
    return parser.parse_args()


def case_of(options: argparse.Namespace) -> Case:
    """Blocks begin at sublayers 0, n, 2n, ... so that there are as many as wanted, or one more or less."""
    stages = options.pp * options.vpp
    total = stages * options.sublayers
    if not 1 <= options.blocks <= total:
        raise SystemExit(f"--blocks {options.blocks}: the model has {total} sublayers, so 1 to {total}")
    lengths = tuple((tokens,) for tokens in options.tokens)
    return Case(options.pp, (options.sublayers,) * stages, -(-total // options.blocks), lengths)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """On a rank: both runners, step by step in turn."""
    case = case_of(options)
    config = AttnResConfig(
        sum(case.sublayers),
        case.block,
        options.hidden,
        max(1, options.hidden // 32),
        4 * options.hidden,
        256,
        torch.float32,
    )
    batches = batches_of(case, config)
    transports = {cache: transport_of(case, config, options) for cache in MODES}
    runners = {cache: rank_runner(case, config, transports[cache], cache=cache)[0] for cache in MODES}
    seconds: dict[bool, list[float]] = {cache: [] for cache in MODES}
    results: dict[bool, StepResult] = {}
    for step in range(options.steps + 1):
        for cache, runner in runners.items():
            group = transports[cache].control
            group.barrier("a step of the benchmark")
            begin = time.perf_counter()
            results[cache] = runner.step(batches)
            took = max(group.allgather(time.perf_counter() - begin, "the time of a step"))
            if step:
                seconds[cache].append(took)
    rows = [row for cache in MODES for row in rows_of(case, config, cache, transports[cache], results[cache])]
    memory = {
        cache: transports[cache].control.allgather(
            (results[cache].memory.store_peak_bytes, results[cache].memory.buffer_bytes), "memory"
        )
        for cache in MODES
    }
    for transport in transports.values():
        transport.close()
    return {
        "rows": rows,
        "seconds": {MODES[cache]: times for cache, times in seconds.items()},
        "store_peak_bytes": {MODES[cache]: max(told)[0] for cache, told in memory.items()},
        "buffer_bytes": {MODES[cache]: max(size for _, size in told) for cache, told in memory.items()},
    }


def transport_of(case: Case, config: AttnResConfig, options: argparse.Namespace) -> PipelineTransport:
    capacity = (max(case.tokens), config.hidden)
    return PipelineTransport(capacity=capacity, dtype=config.dtype, timeout_s=options.timeout)


def rows_of(
    case: Case, config: AttnResConfig, cache: bool, transport: PipelineTransport, result: StepResult
) -> list[dict[str, Any]]:
    """Of every microbatch: block tensors and bytes sent by all ranks, forward and backward, and the closed form."""
    wire = on_the_wire(transport, result)
    hops = case.pp * case.vpp - 1
    expected = case.routes(cache).closed_form()
    rows = []
    for microbatch, tokens in enumerate(case.tokens):
        row_bytes = tokens * config.hidden * config.dtype.itemsize
        directions = ("forward", "backward")
        blocks = [wire.blocks[direction, microbatch] for direction in directions]
        sent = sum(wire.tensor_bytes[direction, microbatch] for direction in directions)
        rows.append(
            {
                "mode": MODES[cache],
                "microbatch": microbatch,
                "tokens": tokens,
                "blocks_forward": blocks[0],
                "blocks_backward": blocks[1],
                "closed_form": expected,
                "block_bytes": sent - 2 * hops * row_bytes,
                "closed_form_bytes": 2 * expected * row_bytes,
                "hidden_bytes": 2 * hops * row_bytes,
            }
        )
    return rows


def figures_of(answer: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = {name: getattr(options, name) for name in ("pp", "vpp", "blocks", "hidden")}
    for mode in MODES.values():
        mine = [row for row in answer["rows"] if row["mode"] == mode]
        found[f"blocks_per_microbatch_{mode}"] = mine[0]["blocks_forward"]
        found[f"closed_form_{mode}"] = mine[0]["closed_form"]
        found[f"block_bytes_{mode}"] = sum(row["block_bytes"] for row in mine)
        found[f"step_ms_{mode}"] = 1e3 * statistics.median(answer["seconds"][mode])
        found[f"store_peak_bytes_{mode}"] = answer["store_peak_bytes"][mode]
        found[f"buffer_bytes_{mode}"] = answer["buffer_bytes"][mode]
    found["bytes_off_the_closed_form"] = sum(row["block_bytes"] != row["closed_form_bytes"] for row in answer["rows"])
    return found


def main() -> int:
    options = parse()
    case_of(options)
    if _host_ranks.is_rank():
        torch.set_num_threads(1)

        def measured(group: Group) -> dict[str, Any]:
            return measure(options)

        _host_ranks.answer(discover().world_size, measured)
        return 0
    answer = _pipeline.ask(__file__, options.pp, sys.argv[1:], options.timeout)
    figures = figures_of(answer, options)
    write_result("pipeline_blocks", figures, answer["rows"], mode="cpu-mpi")
    for name, value in figures.items():
        print(f"{name:32} {value:,.6g}")
    from _pipeline_picture import draw

    picture = results_folder() / "pipeline_blocks.png"
    draw(picture, answer, figures)
    print(f"drawn to {picture}")
    return int(figures["bytes_off_the_closed_form"] > 0)


if __name__ == "__main__":
    sys.exit(main())

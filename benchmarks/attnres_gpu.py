# SPDX-License-Identifier: Apache-2.0
"""Attention residuals over a pipeline on CUDA tensors, BF16: 4 ranks share one GPU. Writes attnres_gpu.json.

python benchmarks/attnres_gpu.py

Each case runs plain and cached and is compared with the unsplit model on the same GPU, and both with float64: the
cache changes the order in which a block's gradients are summed, which BF16 rounds differently. Then two more steps
with PyTorch's detector of device synchronisations: one that counts, one that raises.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _one_gpu
import torch

from ub_dynamic.pipeline import PipelineRunner, PipelineTransport
from ub_dynamic.testing.attnres import AttnResChunk, AttnResConfig, TokenBatch, whole_model
from ub_dynamic.testing.pipeline_cases import Case, batches_of, gradients, in_one_piece, on_the_wire, rank_runner

LENGTHS = ((300, 212), (64,), (500, 130, 70), (33, 33, 33), (900,), (17, 400))
CASES = {
    "interleaved, pp 4, vpp 4": Case(4, (2, *[1] * 14, 0), 4, LENGTHS),
    "1f1b, pp 4": Case(4, (4, 2, 1, 3), 2, LENGTHS),
    "interleaved, pp 4, vpp 2": Case(4, (1,) * 8, 2, LENGTHS),
}
SUMMED = ("bitwise_equal", "tensors", "device_syncs", "distance", "norm")  # over the ranks; of all else the largest
Pairs = list[tuple[str, torch.Tensor, torch.Tensor]]


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    transport = PipelineTransport(
        capacity=(max(map(sum, LENGTHS)), options.hidden),
        dtype=torch.bfloat16,
        device=world.device,
        timeout_s=options.patience,
        poison=True,
    )
    sizes = {"hidden": options.hidden, "heads": options.hidden // 64, "ffn": 4 * options.hidden, "vocab": 512}
    for name, case in CASES.items():
        config = case.config(dtype=torch.bfloat16, device=str(world.device), **sizes)
        whole, _ = in_one_piece(config, batches_of(case, config))
        precise = exact_gradients(case.config(dtype=torch.float64, device=str(world.device), **sizes), case)
        for cache in (False, True):
            begin = time.perf_counter()
            row = run_case(world, case, config, transport, cache, whole, precise)
            row["seconds"] = round(time.perf_counter() - begin, 2)
            add({"case": name, "cache": cache, **row})
            if world.rank == 0:
                print(name, "cached" if cache else "plain", row, flush=True)
    world.meet()
    transport.close()


def run_case(
    world: Any,
    case: Case,
    config: AttnResConfig,
    transport: PipelineTransport,
    cache: bool,
    whole: AttnResChunk,
    precise: AttnResChunk,
) -> dict[str, Any]:
    """One row: errors of a step, then synchronisations of the next ones."""
    batches = batches_of(case, config)
    runner, chunks = rank_runner(case, config, transport, cache=cache)
    blocks = set(on_the_wire(transport, runner.step(batches)).blocks.values())
    mine = errors(gradients(case, transport.rank, chunks, whole), gradients(case, transport.rank, chunks, precise))
    mine["device_syncs"] = count_syncs(runner, batches)
    refuse_syncs(runner, batches)
    told = world.gather(mine)
    row = {key: (sum if key in SUMMED else max)(one[key] for one in told) for key in mine}
    row["rel_error"] = math.sqrt(row.pop("distance") / row.pop("norm"))
    return {**row, "blocks_sent": max(blocks), "buffers": transport.pool.made}


def exact_gradients(config: AttnResConfig, case: Case) -> AttnResChunk:
    """The unsplit model in float64, on every rank by itself."""
    model = whole_model(config)
    for batch in batches_of(case, config):
        model(None, [], batch)[0].backward()
    return model


def errors(to_unsplit: Pairs, to_float64: Pairs) -> dict[str, float]:
    """How far this rank's gradients are from those of the unsplit model in BF16, and both from float64: for each
    tensor, relative to its norm, and for all of them together (squares)."""
    unsplit = [(name, bf16, exact) for (name, _, bf16), (_, _, exact) in zip(to_unsplit, to_float64, strict=True)]
    return {
        "distance": sum(float((mine - theirs).double().square().sum()) for _, mine, theirs in to_unsplit),
        "norm": sum(float(theirs.double().square().sum()) for _, _, theirs in to_unsplit),
        "max_rel_error": relative(to_unsplit),
        "max_rel_error_to_float64": relative(to_float64),
        "unsplit_rel_error_to_float64": relative(unsplit),
        "bitwise_equal": sum(torch.equal(mine, theirs) for _, mine, theirs in to_unsplit),
        "tensors": len(to_unsplit),
    }


def relative(pairs: Pairs) -> float:
    """The largest distance of a gradient from its reference, over the norm of the reference."""
    found = []
    for _, mine, theirs in pairs:
        theirs = theirs.double().cpu()
        norm = float(theirs.norm())
        if norm > 0:
            found.append(float((mine.double().cpu() - theirs).norm()) / norm)
    return max(found, default=0.0)


def count_syncs(runner: PipelineRunner, batches: Sequence[TokenBatch]) -> int:
    """Device synchronisations of one step (not the first: buffers and libraries are set up by then)."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            runner.step(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def refuse_syncs(runner: PipelineRunner, batches: Sequence[TokenBatch]) -> None:
    """The same with every synchronisation an error, at other T first: the schedule is what must not need one."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.step([*batches[3:], *batches[:3]])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        "cases": len(rows),
        "rel_error": max(row["rel_error"] for row in rows),
        "max_rel_error": max(row["max_rel_error"] for row in rows),
        "max_rel_error_plain": max(row["max_rel_error"] for row in rows if not row["cache"]),
        "max_rel_error_to_float64": max(row["max_rel_error_to_float64"] for row in rows),
        "unsplit_rel_error_to_float64": max(row["unsplit_rel_error_to_float64"] for row in rows),
        "device_syncs": sum(row["device_syncs"] for row in rows),
    }


if __name__ == "__main__":
    made = _one_gpu.parser(__doc__, tp=(4,), timeout=85)
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--patience", type=float, default=40, help="seconds that a rank waits for another one")
    chosen = made.parse_args()
    sys.exit(_one_gpu.main("attnres_gpu", chosen, measure, figures))

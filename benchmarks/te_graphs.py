# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs, one a shape, replayed in any order while another shape is active. Writes te_graphs.json.

python benchmarks/te_graphs.py --tp 2 4
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _one_gpu

import ub_dynamic as ubd
from ub_dynamic.backends.te.graphs import GraphedMicrobatches
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, build, collect, differing, random_input, random_tensor, step
from ub_dynamic.testing.te_memory import initialise

LAYERS = ("te.LayerNormMLP", "te.LayerNormLinear", "te.Linear row")


def measure(world: Any, options: argparse.Namespace, add: Callable[[Mapping[str, Any]], None]) -> None:
    capacity, hidden = options.capacity, options.hidden
    lengths = [capacity, capacity // 2, capacity // 8 + world.size, 8 * world.size]
    for name in LAYERS:
        kind, overlap = KINDS[name], OVERLAPS["default"]
        manager = initialise(world, [capacity, hidden])
        layer = build(kind, overlap, hidden, world)
        expected = {}
        for tokens in lengths:
            with manager.active_shape([tokens, hidden]):
                expected[tokens] = step(layer, random_input(kind, tokens, hidden, world), world)
        graphed = GraphedMicrobatches(layer, manager)
        choose = random.Random(options.seed)
        mismatches = 0
        for _ in range(options.replays):
            tokens, other = choose.choice(lengths), choose.choice(lengths)
            world.barrier()
            manager.set_active_shape([other, hidden])
            leaf = random_input(kind, tokens, hidden, world).requires_grad_()
            output = graphed(tokens, leaf)
            output.backward(random_tensor(tuple(output.shape), world, 5 * output.numel() + 3))
            mismatches += bool(differing(collect(layer, leaf, output), expected[tokens]))
        row = {"layer": name, "shapes": len(lengths), "captures": graphed.captures, "replays": graphed.replays}
        add({**row, "mismatches": max(world.gather(mismatches))})
        world.barrier()
        graphed.clear()
        del graphed, manager
        ubd.destroy_ub()


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    keys = ("replays", "mismatches", "captures")
    return {key: sum(row[key] for row in rows) for key in keys}


if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=150)
    options.add_argument("--replays", type=int, default=60, help="for each layer")
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--capacity", type=int, default=2048)
    options.add_argument("--seed", type=int, default=20261130)
    raise SystemExit(_one_gpu.main("te_graphs", options.parse_args(), measure, figures))

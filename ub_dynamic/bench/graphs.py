# SPDX-License-Identifier: Apache-2.0
"""``bench graphs``: CUDA graphs, one a shape, replayed in any order, another shape set before each (TE only)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UBUnsupportedError
from .report import Report
from .worlds import TEWorld, World

LAYERS = ("te.LayerNormMLP", "te.LayerNormLinear", "te.Linear row")


def measure(world: World, options: Mapping[str, Any], report: Report) -> None:
    """Options: ``capacity``, ``hidden``, ``replays`` of each layer, ``seed``."""
    if not isinstance(world, TEWorld):
        raise UBUnsupportedError("graphs: CUDA graphs need --backend te")
    for number, name in enumerate(LAYERS):
        report.progress(number, len(LAYERS), name)
        report.row({"tp": world.size, **_one_layer(world, name, options)})
    report.progress(len(LAYERS), len(LAYERS), "done")


def lengths_of(capacity: int, tp: int) -> list[int]:
    """Every T that is captured and replayed."""
    return [capacity, capacity // 2, capacity // 8 + tp, 8 * tp]


def _one_layer(bench: TEWorld, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    from ..backends.te.graphs import GraphedMicrobatches
    from ..testing.te_layers import KINDS, OVERLAPS, build, collect, differing, random_input, random_tensor, step

    world, capacity, hidden = bench.world, options["capacity"], options["hidden"]
    lengths = lengths_of(capacity, world.size)
    kind, overlap = KINDS[name], OVERLAPS["default"]
    manager = bench.initialize(capacity, hidden)
    layer = build(kind, overlap, hidden, world)
    expected = {}
    for tokens in lengths:
        with manager.active_shape([tokens, hidden]):
            expected[tokens] = step(layer, random_input(kind, tokens, hidden, world), world)
    graphed = GraphedMicrobatches(layer, manager)
    choose = random.Random(options["seed"])
    mismatches = 0
    for _ in range(options["replays"]):
        tokens, other = choose.choice(lengths), choose.choice(lengths)
        world.barrier()
        manager.set_active_shape([other, hidden])
        leaf = random_input(kind, tokens, hidden, world).requires_grad_()
        output = graphed(tokens, leaf)
        output.backward(random_tensor(tuple(output.shape), world, 5 * output.numel() + 3))
        mismatches += bool(differing(collect(layer, leaf, output), expected[tokens]))
    row = {"layer": name, "shapes": len(lengths), "captures": graphed.captures, "replays": graphed.replays}
    row["mismatches"] = max(world.gather(mismatches))
    world.barrier()
    graphed.clear()
    del graphed, manager
    bench.destroy()
    return row


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums over the layers and starts."""
    return {key: sum(row[key] for row in rows) for key in ("replays", "mismatches", "captures")}

# SPDX-License-Identifier: Apache-2.0
"""The first thing to run on a new GPU machine: one layer, a few shapes, dynamic against exact, in half a
minute.

    python -m ub_dynamic one-gpu -n 2 -- python tests/gpu/smoke.py
"""

from __future__ import annotations

import sys

import torch

import ub_dynamic as ubd
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, build, differing, random_input, step
from ub_dynamic.testing.te_world import World, poison, quantization_modes, stock_userbuffers, te_world

HIDDEN, CAPACITY = 1024, 2048


def main(world: World) -> int:
    kind, overlap = KINDS["te.LayerNormMLP"], OVERLAPS["default"]
    lengths = [CAPACITY, CAPACITY // 2, 16 * world.size, CAPACITY - 2 * world.size]
    ubd.initialize_ub(
        [CAPACITY, HIDDEN],
        world.size,
        quantization_modes=quantization_modes(["none"]),
        dtype=torch.bfloat16,
        bootstrap_backend="gloo",
        backend="te",
    )
    layer = build(kind, overlap, HIDDEN, world)
    found = {}
    for tokens in lengths:
        poison(world)
        report = ubd.set_ub_active_shape([tokens, HIDDEN])
        if world.rank == 0 and tokens == CAPACITY // 2:
            print("follow the active shape:", *report.updated, "| at capacity:", dict(report.skipped))
        found[tokens] = step(layer, random_input(kind, tokens, HIDDEN, world), world)
    world.barrier()
    ubd.destroy_ub()
    wrong = 0
    for tokens in lengths:
        with stock_userbuffers(world, [tokens, HIDDEN]):
            expected = step(layer, random_input(kind, tokens, HIDDEN, world), world)
        differences = differing(found[tokens], expected)
        wrong += len(differences)
        print(f"T = {tokens}: {len(expected)} tensors, different: {differences or 'none'}")
    return sum(world.gather(wrong))


if __name__ == "__main__":
    with te_world() as joined:
        different = main(joined)
    print("SMOKE", "FAILED" if different else "PASSED")
    sys.exit(1 if different else 0)

# SPDX-License-Identifier: Apache-2.0
"""A policy on a GPU: every choice as good as that configuration alone, at no memory, with nothing left behind."""

from __future__ import annotations

import torch
from harness import case, expect, expect_raises, note, userbuffers

import ub_dynamic as ubd
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice, Policy
from ub_dynamic.testing import te_policy
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, build, differing, random_input, step
from ub_dynamic.testing.te_world import World, communicators

HIDDEN, CAPACITY = te_policy.HIDDEN, te_policy.CAPACITY
RING, NONE = OverlapConfig("ring_exchange"), OverlapConfig("none")


@case(limit_s=300)
def policy_switches_at_every_microbatch(world: World) -> None:
    """1,000 microbatches, each at another T with other configurations: bits, memory."""
    outcome = te_policy.run(world, 1000, 20261130)
    note(world, f"{outcome}")
    expect(world, outcome.mismatches == 0, f"{outcome.mismatches} differ, {outcome.first}")
    expect(world, outcome.switches >= 1000, f"{outcome.switches} switches")
    expect(world, outcome.memory_growth_bytes <= 0, f"{outcome.memory_growth_bytes} bytes more")


@case()
def policy_shares_one_region(world: World) -> None:
    """Alternatives have the address of the ring reduce-scatter, and no address moves."""
    gemms = ("fc2_fprop", "proj_fprop", "fc1_dgrad", "qkv_dgrad")
    policy = Policy(
        (1, 512),
        ({gemm: Choice(RING, "small T") for gemm in gemms}, {gemm: Choice(NONE, "large T") for gemm in gemms}),
    )
    with userbuffers(world, CAPACITY, HIDDEN, policy=policy) as manager:
        before = _addresses()
        for gemm in gemms:
            expect(world, before[gemm] == before[f"{gemm} (ring_exchange)"], f"{gemm} has a buffer of its own")
        for tokens in (256, CAPACITY, 128, 512):
            manager.set_active_shape([tokens, HIDDEN])
            expect(world, _addresses() == before, f"T = {tokens}: an address moved")


def _addresses() -> dict[str, int]:
    return {key[0]: communicators()[key].get_buffer().data_ptr() for key in list(communicators())}


@case()
def policy_is_gone_after_destroy(world: World) -> None:
    """Layers of a policy's time work without one, with the flags that they were built with."""
    kind, overlap = KINDS["te.LayerNormMLP"], OVERLAPS["default"]
    policy = _constant({"fc1_fprop": NONE, "fc2_dgrad": NONE, "fc2_fprop": RING, "fc1_dgrad": RING})
    with userbuffers(world, CAPACITY, HIDDEN) as manager:
        layer = build(kind, overlap, HIDDEN, world)
        manager.set_active_shape([256, HIDDEN])
        expected = step(layer, random_input(kind, 256, HIDDEN, world), world)
    for _ in range(3):
        with userbuffers(world, CAPACITY, HIDDEN, policy=policy) as manager:
            manager.set_active_shape([256, HIDDEN])
            step(layer, random_input(kind, 256, HIDDEN, world), world)
            runs = manager.backend.guard.runs  # type: ignore[attr-defined]
            expect(
                world, {name for name, _ in runs} == {"fc2_fprop (ring_exchange)", "fc1_dgrad (ring_exchange)"}, runs
            )
        with userbuffers(world, CAPACITY, HIDDEN) as manager:
            manager.set_active_shape([256, HIDDEN])
            wrong = differing(step(layer, random_input(kind, 256, HIDDEN, world), world), expected)
            expect(world, not wrong, wrong)


@case()
def policy_refuses_what_te_cannot(world: World) -> None:
    """Before anything is registered; TE can be initialised afterwards."""
    wide = OverlapConfig("pipeline", num_sm=33)
    for choices, modes, parts in (
        ({"fc2_fprop": wide}, ("none",), ("num_sm = 33", "at most 32")),
        ({"fc2_fprop": RING}, ("fp8",), ("BF16",)),
        ({"fc1_dgrad": OverlapConfig("pipeline")}, ("none",), ("silently wrong",)),
    ):

        def initialise(choices: dict[str, OverlapConfig] = choices, modes: tuple[str, ...] = modes) -> None:
            with userbuffers(world, CAPACITY, HIDDEN, modes=modes, policy=_constant(choices)):
                pass

        expect_raises(world, ubd.UBDynamicError, parts, initialise, f"{choices}")
    with userbuffers(world, CAPACITY, HIDDEN):
        torch.cuda.synchronize()


def _constant(choices: dict[str, OverlapConfig]) -> Policy:
    return Policy((1,), ({gemm: Choice(config, "always") for gemm, config in choices.items()},))

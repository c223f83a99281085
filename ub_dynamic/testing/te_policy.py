# SPDX-License-Identifier: Apache-2.0
"""Random choices of overlap at random T on TE's layers, each compared with that configuration used alone.

Every T has a choice of its own for each GEMM. What a choice gives alone is computed first, on buffers that TE makes for
exactly this T with exactly these configurations, by layers that are built for them. Then the policy runs: another T at
each microbatch, the forward of the next one before the backward of the last, on one set of communicators.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import ub_dynamic as ubd

from ..backends.names import DGRAD_REDUCE_SCATTER
from ..overlap import OverlapConfig
from ..policy import Choice, Policy
from .te_bits import random_lengths
from .te_layers import KINDS, collect, differing, fill_parameters, random_tensor
from .te_memory import initialise
from .te_stress import Narrow, requested_bytes
from .te_world import World, stock_userbuffers, ub_cfgs_with_room

HIDDEN, CAPACITY, LENGTHS = 512, 1024, 20
BLOCKS = ("attention", "mlp")
Choices = Mapping[str, OverlapConfig]
Tensors = dict[str, torch.Tensor]
_NONE, _RING = OverlapConfig("none"), OverlapConfig("ring_exchange")


@dataclass(frozen=True)
class Outcome:
    """The worst of all ranks. ``first``: the first microbatch that differs, and in what."""

    microbatches: int
    switches: int
    configurations: int
    mismatches: int
    memory_growth_bytes: int
    first: str


def stages(world: World, seed: int, lengths: int = LENGTHS) -> dict[int, Choices]:
    """A random choice for every GEMM at each of ``lengths`` T; the same on every rank."""
    choose = random.Random(seed)
    sms = (4, 8, 16) if world.size <= 2 * torch.cuda.device_count() else (2, 4, 8)
    tokens = sorted(set(random_lengths(lengths, world.size, CAPACITY, seed)))
    return {count: _random_choices(choose, sms) for count in tokens}


def policy_of_stages(found: Mapping[int, Choices]) -> Policy:
    """From each T on its choices."""
    return Policy(
        tuple(found),
        tuple({gemm: Choice(config, "at random") for gemm, config in choices.items()} for choices in found.values()),
    )


def _random_choices(choose: random.Random, sms: tuple[int, ...]) -> Choices:
    gathers = (_RING, OverlapConfig("ring_exchange", aggregate=True), _NONE)
    pipelines = [
        OverlapConfig("pipeline", num_sm=num_sm, num_splits=num_splits, first_gemm=first_gemm)
        for num_sm, num_splits, first_gemm in itertools.product(sms, (2, 4), (False, True))
    ]
    scatters = (_RING, _NONE, *pipelines)
    backwards = (_RING, _NONE, *(OverlapConfig("bulk", num_sm=num_sm) for num_sm in sms))
    made = {gemm: choose.choice(gathers) for gemm in ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad")}
    made |= {gemm: choose.choice(scatters) for gemm in ("proj_fprop", "fc2_fprop")}
    made |= {gemm: choose.choice(backwards) for gemm in DGRAD_REDUCE_SCATTER}
    if _NONE in (made["fc1_fprop"], made["fc2_dgrad"]):  # LayerNormMLP has one flag for both
        made["fc1_fprop"] = made["fc2_dgrad"] = _NONE
    return made


def layer_flags(choices: Choices, gather: str, scatter: str, backward: str) -> dict[str, bool]:
    """TE's flags of a layer that is built for ``choices``: of its all-gather, its reduce-scatter, its column dgrad."""

    def method(gemm: str) -> str:
        return choices[gemm].method if gemm in choices else "none"

    return {
        "ub_overlap_ag": method(gather) != "none",
        "ub_overlap_rs": method(scatter) != "none",
        "ub_overlap_rs_dgrad": method(backward) == "ring_exchange",
        "ub_bulk_dgrad": method(backward) == "bulk",
        "ub_bulk_wgrad": method(backward) == "bulk",
    }


def blocks(world: World, choices: Choices | None = None) -> dict[str, torch.nn.Module]:
    """The layers, built for ``choices``, or with every overlap where a policy chooses."""
    chosen = choices or dict.fromkeys(("qkv_fprop", "proj_fprop", "proj_dgrad", "fc1_fprop", "fc2_fprop"), _RING) | {
        gemm: OverlapConfig("bulk") for gemm in DGRAD_REDUCE_SCATTER
    }
    made = {
        "attention": torch.nn.Sequential(
            KINDS["te.Linear column"].build(HIDDEN, world, layer_flags(chosen, "qkv_fprop", "", "qkv_dgrad")),
            torch.nn.Tanh(),
            Narrow(HIDDEN // world.size),
            KINDS["te.Linear row"].build(HIDDEN, world, layer_flags(chosen, "proj_dgrad", "proj_fprop", "")),
        ),
        "mlp": KINDS["te.LayerNormMLP"].build(
            HIDDEN, world, layer_flags(chosen, "fc1_fprop", "fc2_fprop", "fc1_dgrad")
        ),
    }
    for block in made.values():
        fill_parameters(block, world)
    return made


def run(world: World, count: int, seed: int) -> Outcome:
    """``count`` microbatches under a random policy; collective."""
    found = stages(world, seed)
    expected = {tokens: _alone(world, tokens, choices) for tokens, choices in found.items()}
    switches, wrong, growth = _under_policy(world, found, expected, count, seed)
    configurations = len({(gemm, config) for choices in found.values() for gemm, config in choices.items()})
    first = next(iter(wrong.values()), "")
    outcomes = world.gather(Outcome(count, switches, configurations, len(wrong), growth, first))
    worst = max(outcomes, key=lambda outcome: outcome.mismatches)
    growth = max(outcome.memory_growth_bytes for outcome in outcomes)
    return Outcome(count, switches, configurations, worst.mismatches, growth, worst.first)


def _alone(world: World, tokens: int, choices: Choices) -> dict[str, Tensors]:
    from ..backends.te.alternatives import alone

    cfgs: Any = ub_cfgs_with_room(world)
    for gemm, config in choices.items():
        cfgs = alone(gemm, config, cfgs)
    with stock_userbuffers(world, [tokens, HIDDEN], ub_cfgs=cfgs):
        made = {}
        for name, block in blocks(world, choices).items():
            leaf, output = _forward(world, name, block, tokens)
            made[name] = _backward(world, block, leaf, output)
        world.barrier()
    return made


def _under_policy(
    world: World, found: Mapping[int, Choices], expected: Mapping[int, dict[str, Tensors]], count: int, seed: int
) -> tuple[int, dict[int, str], int]:
    manager = initialise(
        world, [CAPACITY, HIDDEN], ub_cfgs=ub_cfgs_with_room(world), policy=policy_of_stages(found)
    )  # fmt: skip
    made = blocks(world)
    choose = random.Random(seed + 1)
    wrong: dict[int, str] = {}

    def finish(number: int, name: str, tokens: int, leaf: torch.Tensor, output: torch.Tensor) -> None:
        tensors = _backward(world, made[name], leaf, output)
        if number >= 0 and (problem := differing(tensors, expected[tokens][name])):
            wrong[number] = f"microbatch {number}: {name}, T = {tokens}, {found[tokens]}: {sorted(problem)}"

    def start(tokens: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        with manager.microbatch(tokens) as microbatch:
            leaf, output = _forward(world, name, made[name], tokens)
            return leaf, microbatch.bind_backward(output)

    for tokens in found:  # whatever is allocated on first use is there then
        for name in BLOCKS:
            finish(-1, name, tokens, *start(tokens, name))
    # Every T is a stage of its own, the capacity too, so that each change of T is a switch.
    tokens, changes, memory = 0, manager.shape_changes, requested_bytes()
    waiting: tuple[Any, ...] | None = None
    for number in range(count):
        tokens = choose.choice([each for each in found if each != tokens])
        name = choose.choice(BLOCKS)
        leaf, output = start(tokens, name)
        if waiting is not None:
            finish(*waiting)
        waiting = number, name, tokens, leaf, output
        if number % 200 == 199:
            world.meet()  # no rank runs away from a rank board of 1024 changes
    if waiting is not None:
        finish(*waiting)
    del waiting, leaf, output
    growth, switches = requested_bytes() - memory, manager.shape_changes - changes
    world.barrier()
    ubd.destroy_ub()
    return switches, wrong, growth


def _forward(world: World, name: str, block: torch.nn.Module, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 7 * tokens + BLOCKS.index(name)
    leaf = random_tensor((tokens // world.size, HIDDEN), world, seed).requires_grad_()
    return leaf, block(leaf)


def _backward(world: World, block: torch.nn.Module, leaf: torch.Tensor, output: torch.Tensor) -> Tensors:
    output.backward(random_tensor(tuple(output.shape), world, 5 * output.numel() + 3))
    return collect(block, leaf, output)

# SPDX-License-Identifier: Apache-2.0
"""A policy does at each T what its configurations do alone: the same overlaps, in the same order, by communicators that
agree in everything that an overlap reads.

Alone: TE's ``initialize_ub`` at exactly T with exactly these configurations, and layers that are built for them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import fakes
import policy_te
import pytest
import torch
import transformer_engine.pytorch.module.base as base
import transformer_engine_torch as tex
from cpu_te import CAPACITY, HIDDEN, TP, Call, _recorded_gemm, layer, operand
from policy_te import te_world

from ub_dynamic.backends.names import DGRAD_REDUCE_SCATTER, GEMM_METHODS
from ub_dynamic.backends.te import native
from ub_dynamic.backends.te.alternatives import alone
from ub_dynamic.manager import Manager
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.testing.te_policy import _random_choices, layer_flags, policy_of_stages

LAYERS = {
    "qkv": ("linear", ("qkv_fprop", "", "qkv_dgrad")),
    "proj": ("linear", ("proj_dgrad", "proj_fprop", "")),
    "fc1": ("mlp", ("fc1_fprop", "fc2_fprop", "fc1_dgrad")),
}
ONE_FLAG = ("fc1_fprop", "fc2_dgrad")  # of LayerNormMLP
Seen = list[tuple[Any, ...]]


def build(choices: Mapping[str, OverlapConfig]) -> dict[str, torch.nn.Module]:
    return {name: layer(kind, name, **layer_flags(choices, *gemms)) for name, (kind, gemms) in LAYERS.items()}


def configured(cfgs: Any) -> dict[str, OverlapConfig]:
    """The method of each GEMM that ``cfgs`` configure, none of them off."""
    usual = {name: "bulk" if name in DGRAD_REDUCE_SCATTER else "ring_exchange" for name in GEMM_METHODS}
    methods = {name: (cfgs or {}).get(name, {}).get("method", usual[name]) for name in GEMM_METHODS}
    return {name: OverlapConfig(method) for name, method in methods.items()}


def record(patch: pytest.MonkeyPatch) -> Seen:
    """Everything that each overlap reads of its communicator, from now on."""
    seen: Seen = []
    calls: list[Call] = []
    module = native.load()

    class Names(dict[int, str]):
        def __missing__(self, key: int) -> str:
            return "any"

    gemm = _recorded_gemm(calls, Names())

    def generic_gemm(*args: Any, **kwargs: Any) -> Any:
        result = gemm(*args, **kwargs)
        comm = kwargs.get("comm_overlap")
        if comm is not None:
            facts = module.inspect(comm)
            address = facts["data_ptr"]
            chunks = tuple((pointer - address, rows, hidden) for pointer, rows, hidden in facts["chunks"])
            splits = facts["num_splits"] if calls[-1].kind == "rs" else None  # a bulk overlap reads none
            keys = ("shape", "dtype", "is_p2p", "num_sm", "math_sms", "use_ce", "reduce_scatter", "aggregate")
            first_gemm = facts.get("first_gemm") if calls[-1].kind == "rs" else None
            seen.append((calls[-1].kind, splits, first_gemm, chunks, *(facts.get(key) for key in keys)))
        return result

    patch.setattr(tex, "generic_gemm", generic_gemm)
    return seen


def step(module: torch.nn.Module, tokens: int) -> None:
    module(operand(module, tokens)).sum().backward()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "cfgs",
    [
        None,
        {
            "fc2_fprop": {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False},
            "qkv_dgrad": {"method": "ring_exchange"},
            "proj_fprop": {"num_sm": 6, "num_splits": 2, "set_sm_margin": False},
            "fc1_wgrad": {"num_sm": 2},
            "fc1_fprop": {"aggregate": True},
        },
    ],
)
def test_each_overlap_is_that_of_its_configuration_alone(seed: int, cfgs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    tokens = (16, 32, 64, 128, CAPACITY)
    stages = {count: dict(_random_choices(choose, (2, 4, 8))) for count in tokens}
    if seed == 2:  # GEMMs that no choice names do as configured
        stages = {
            count: {k: v for k, v in choices.items() if choose.random() < 0.6} for count, choices in stages.items()
        }
        for choices in stages.values():
            if len({name in choices and choices[name].method == "none" for name in ONE_FLAG}) == 2:
                for name in ONE_FLAG:
                    choices.pop(name, None)
    expected = {count: run_alone(stages[count], count, cfgs) for count in tokens}
    policy = policy_of_stages(stages)
    with te_world(monkeypatch, policy.configurations(), cfgs) as world:
        manager = Manager(world.backend, (CAPACITY, HIDDEN), check="never", guard=False, policy=policy)
        modules = build(configured(cfgs))
        seen = record(monkeypatch)
        for _ in range(30):
            count = choose.choice(tokens)
            manager.set_active_shape([count, HIDDEN])
            seen.clear()
            for module in modules.values():
                step(module, count)
            assert seen == expected[count], (count, stages[count])


def run_alone(choices: Mapping[str, OverlapConfig], tokens: int, cfgs: Any) -> Seen:
    made = cfgs
    for gemm, config in choices.items():
        made = alone(gemm, config, made)
    with pytest.MonkeyPatch.context() as patch, policy_te.stock(patch):
        base.initialize_ub(
            [tokens, HIDDEN], TP, quantization_modes=[fakes.MODES.NONE], ub_cfgs=made, bootstrap_backend="gloo"
        )
        seen = record(patch)
        for module in build({**configured(cfgs), **choices}).values():
            step(module, tokens)
        return seen

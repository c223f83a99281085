# SPDX-License-Identifier: Apache-2.0
"""Megatron's own schedules and transfers over gloo, with microbatches of different T: what every layer sees."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ub_dynamic.testing.launch import run_ranks

pytestmark = [pytest.mark.te, pytest.mark.timeout(900)]

LENGTHS = [128, 64, 96, 32]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
RUNS: dict[str, dict[str, Any]] = {
    "1f1b": {"install": True, "lengths": LENGTHS},
    "1f1b, stock": {"install": False, "lengths": LENGTHS},
    "1f1b, full recomputation": {"install": True, "lengths": LENGTHS, "config": FULL},
    "1f1b, selective recomputation": {"install": True, "lengths": LENGTHS, "config": SELECTIVE},
    "interleaved": {"install": True, "lengths": LENGTHS, "vpp": 2},
    "evaluation": {"install": True, "lengths": LENGTHS, "forward_only": True},
}
Found = list[dict[str, Any]]  # by rank


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return start(2, RUNS, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return start(1, {"no pipeline": {"install": True, "lengths": LENGTHS}}, tmp_path_factory.mktemp("one"))


def start(ranks: int, runs: dict[str, dict[str, Any]], folder: Path) -> Found:
    program = Path(__file__).with_name("megatron_ranks.py")
    run_ranks(program, ranks, [str(folder), json.dumps(runs)], launcher="torchrun", timeout=400).check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def wrong(found: Found, name: str) -> list[Any]:
    """What a layer worked on while another T was active."""
    return [(rank, *event) for rank, made in enumerate(found) for event in made[name]["events"] if event[2] != event[3]]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "1f1b, stock"])
def test_every_layer_sees_its_own_tokens(two_stages: Found, name: str) -> None:
    assert wrong(two_stages, name) == []
    for made in two_stages:
        seen = {event[2] for event in made[name]["events"]}
        assert seen == set(LENGTHS)


def test_without_install_the_capacity_stays_active(two_stages: Found) -> None:
    """What makes the test above one that can fail."""
    assert {event[1] for event in wrong(two_stages, "1f1b, stock")} == {"forward", "backward"}


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_a_backward_follows_the_forward_of_another_microbatch(two_stages: Found, name: str) -> None:
    """So setting T in the forward alone would not do."""
    events = two_stages[0][name]["events"]
    changes = [(a, b) for a, b in itertools.pairwise(events) if (a[0], b[0]) == ("forward", "backward")]
    assert changes
    assert all(before[2] != after[2] for before, after in changes[:2])


def test_recomputation_runs_inside_the_backward(two_stages: Found) -> None:
    plain, again = (two_stages[0][name]["events"] for name in ("1f1b", "1f1b, full recomputation"))
    forwards = [sum(event[0] == "forward" for event in events) for events in (plain, again)]
    assert forwards[1] == 2 * forwards[0]


def test_nothing_is_computed_otherwise(two_stages: Found) -> None:
    for made in two_stages:
        stock = made["1f1b, stock"]
        assert made["1f1b"]["losses"] == stock["losses"]
        assert made["1f1b"]["gradients"] == stock["gradients"]
        assert len(stock["gradients"]) > 20


def test_no_pipelining(one_stage: Found) -> None:
    assert wrong(one_stage, "no pipeline") == []
    order = [event[0] for event in one_stage[0]["no pipeline"]["events"]]
    assert order == (["forward"] * 4 + ["backward"] * 4) * len(LENGTHS)

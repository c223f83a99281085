# SPDX-License-Identifier: Apache-2.0
"""Where many ranks share one machine: fewer streaming multiprocessors for TE's kernels, whole cores for each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ub_dynamic.testing.te_layers import OVERLAPS
from ub_dynamic.testing.te_world import World, ub_cfgs_with_room, whole_cores


def world(size: int) -> World:
    return World(0, size, torch.device("cpu"), None, None)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS)
def test_two_ranks_keep_their_configuration(overlap) -> None:
    assert ub_cfgs_with_room(world(2), overlap.ub_cfgs) == overlap.ub_cfgs


@pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS)
def test_four_ranks_get_few_processors_for_what_is_no_ring(overlap) -> None:
    cfgs = ub_cfgs_with_room(world(4), overlap.ub_cfgs)
    assert cfgs is not None
    for name, cfg in cfgs.items():
        before = dict((overlap.ub_cfgs or {}).get(name, {}))
        ring = before.get("method") == "ring_exchange"
        assert cfg == (before if ring else {"num_sm": 4, **before})
    assert {"proj_fprop", "fc2_fprop"} <= set(cfgs)
    assert overlap.dgrad_rs == ("fc1_wgrad" not in cfgs), "TE refuses it beside a dgrad that is no bulk overlap"


def test_a_configured_number_stays() -> None:
    assert ub_cfgs_with_room(world(4), {"fc2_fprop": {"num_sm": 8}})["fc2_fprop"] == {"num_sm": 8}


def test_one_rank_a_gpu_keeps_te_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert ub_cfgs_with_room(world(4), None) is None


def test_processors_of_one_core_stay_together(tmp_path: Path) -> None:
    for processor in range(8):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{processor % 4},{processor % 4 + 4}\n")
    assert whole_cores([0, 1, 2, 4, 5, 6], tmp_path) == [(0, 4), (1, 5), (2, 6)]
    assert whole_cores([0, 9], tmp_path) == [(0,), (9,)]

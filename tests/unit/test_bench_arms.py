# SPDX-License-Identifier: Apache-2.0
"""What is compared: arms and peers that a mode has, workloads, and the figures of the rows."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import FakeWorld
from fake_backend import FakeBackend

from ub_dynamic.bench import lengths, op, start, tp_step
from ub_dynamic.bench.arms import GUARDED, said, use_arm
from ub_dynamic.bench.benches import BENCHES
from ub_dynamic.bench.operations import GEMMS
from ub_dynamic.bench.peers import PEERS
from ub_dynamic.bench.report import Report
from ub_dynamic.bench.workloads import DISTRIBUTIONS, LogNormal, microbatches
from ub_dynamic.bench.worlds import refusal
from ub_dynamic.errors import UBShapeError, UBUnsupportedError
from ub_dynamic.manager import Manager
from ub_dynamic.modes import shares_gpu
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice, Policy
from ub_dynamic.testing import te_world


@pytest.mark.parametrize("costs", [True, False])
def test_what_the_guard_costs_is_asked_for_at_the_smallest_t_unless_it_is_left_out(
    costs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, tuple[str, ...]] = {}

    def one_length(world: Any, steps_of: Any, options: Any, tokens: int, arms: tuple[str, ...], until: float) -> Any:
        seen[tokens] = arms
        return {}

    for name, value in (("one_length", one_length), ("factory_of", lambda *_: None), ("settle", lambda world: None)):
        monkeypatch.setattr(tp_step, name, value)
    world: Any = FakeWorld(lambda arm, steps: 1.0)
    options = {"arms": ["dynamic", "exact"], "tokens": [64, 128], "seconds": 1.0, "costs": costs}
    tp_step.measure(world, options, Report())
    assert seen == {128: ("dynamic", "exact"), 64: ("dynamic", "exact", *(tp_step.COSTS if costs else ()))}


@pytest.mark.parametrize("name", ["tp-step", "lengths"])
def test_timed_steps_run_as_te_runs_by_default(name: str) -> None:
    """te_world switches to what repeats bits: attention's backward would be another, slower one."""
    for variable in te_world._DETERMINISTIC:
        assert variable == "PYTORCH_JIT" or BENCHES[name].env[variable] == "1"


def test_an_arm_with_a_policy_stands_at_its_plan_after_one_without() -> None:
    ring = OverlapConfig("ring_exchange")
    policy = Policy((1,), ({"fc2_fprop": Choice(ring, "one stage for every T")},))
    backend = FakeBackend()
    manager = Manager(backend, (128, 64), check="never", policy=policy)
    for _ in range(2):
        for arm in ("dynamic", "pad", "unguarded", "auto"):
            use_arm(manager, arm, policy)
            assert backend.calls[-1] == {} and backend.followed[-1] is False and manager.policy is None
            assert manager.auto is (arm == "auto") and (backend.on_operand is not None) is (arm in GUARDED)
        use_arm(manager, "policy", policy)
        assert backend.calls[-1] == {"fc2_fprop": ring} and backend.followed[-1] is True
        assert not manager.auto and backend.on_operand is not None


def test_a_row_says_what_a_policy_chose_for_its_layers() -> None:
    ring = OverlapConfig("ring_exchange")
    bulk = Choice(OverlapConfig("bulk"), "")
    choices = {"fc2_fprop": Choice(ring, ""), "fc1_dgrad": bulk, "qkv_fprop": Choice(ring, "")}
    assert said(choices, ("fc1", "fc2")) == {"policy": "fc2_fprop ring_exchange, fc1_dgrad bulk"}
    assert said({}, ("fc1",), ("a", "b")) == {"policy": "as configured", "policy_otherwise": "a; b"}


class TestRefusals:
    def test_a_shared_gpu_cannot_time_what_needs_one_each(self) -> None:
        assert shares_gpu("one-gpu-2-ranks") and not shares_gpu("2-gpus") and not shares_gpu("cpu-mpi")
        for arm in ("none", "async_tp", "cublasmp"):
            assert "share one GPU" in (refusal("one-gpu-4-ranks", arm) or "")
            assert refusal("4-gpus", arm) is None
        assert refusal("one-gpu-4-ranks", "exact") is None

    def test_peers_say_why_they_are_not_there(self) -> None:
        host = FakeWorld(lambda plan, steps: 1.0)
        gemm = GEMMS["fc1_fprop"]
        reasons = {name: peer.available(host, gemm) for name, peer in PEERS.items()}  # type: ignore[arg-type]
        assert {name for name, reason in reasons.items() if reason is None} == {"default", "none", "plain"}
        assert "CUDA" in str(reasons["async_tp"])

    def test_arms_that_cannot_be_compared_are_left_out(self) -> None:
        world = FakeWorld(lambda plan, steps: 1.0)
        world.mode = "one-gpu-2-ranks"
        events: list[Any] = []
        report = Report(events.append)
        arms = tp_step.supported(world, tp_step.ARMS, None, report)  # type: ignore[arg-type]
        assert arms == ("dynamic", "exact", "pad", "rebuild")
        assert len(events) == 2 and "policy: there is no table" in events[1]["refused"]

    def test_modes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert start.mode_of("te", 2) == "2-gpus"
        assert start.mode_of("te", 4) == "one-gpu-4-ranks"
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(UBUnsupportedError, match="--backend host needs none"):
            start.mode_of("te", 2)
        with pytest.raises(UBUnsupportedError, match="at least 2"):
            start.mode_of("host", 1)


class TestWorkloads:
    def test_published_statistics_are_reproduced(self) -> None:
        drawn = {name: found.draw(40_000, 1) for name, found in DISTRIBUTIONS.items()}
        assert statistics.fmean(drawn["openwebtext"]) == pytest.approx(1128, rel=0.05)
        assert statistics.fmean(drawn["stackexchange"]) == pytest.approx(553, rel=0.05)
        assert statistics.fmean(drawn["arxiv"]) == pytest.approx(11_932, rel=0.05)
        inside = [8192 <= length <= 65536 for length in drawn["longalign"]]
        assert statistics.fmean(inside) == pytest.approx(0.98, abs=0.005)

    def test_every_rank_draws_the_same(self) -> None:
        assert LogNormal(100, 1).draw(50, 3) == LogNormal(100, 1).draw(50, 3) != LogNormal(100, 1).draw(50, 4)

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "lengths"
        options = {"capacity": 64, "hidden": 64, "count": 8, "seed": 0, "distributions": [], "documents": 1}
        options["file"] = str(path)
        path.write_text("12\n\n 7 \n")
        assert lengths.workloads_of(options, 2) == {"lengths": [12, 8]}
        path.write_text("12\nx\n")
        with pytest.raises(UBShapeError, match=r"lengths, line 2: 'x' is no length"):
            lengths.workloads_of(options, 2)
        path.write_text("")
        with pytest.raises(UBShapeError, match="no length"):
            lengths.workloads_of(options, 2)

    def test_a_file_of_records_as_advise_takes_it(self, tmp_path: Path) -> None:
        path = tmp_path / "lengths.jsonl"
        path.write_text('{"length": 12}\n{"length": [1, 2, 3]}\n')
        options = {"capacity": 64, "hidden": 64, "count": 8, "seed": 0, "distributions": [], "file": str(path)}
        assert lengths.workloads_of(options, 2) == {"lengths.jsonl": [16]}

    def test_microbatches_fit_and_are_valid(self) -> None:
        lengths = DISTRIBUTIONS["stackexchange"].draw(200, 0)
        for documents in (None, 3):
            found = microbatches(lengths, 2048, 2, multiple=64, documents=documents)
            assert all(0 < tokens <= 2048 and tokens % 64 == 0 for tokens in found)
        assert len(microbatches(lengths, 2048, 2, documents=3)) == -(-200 // 3)


class TestFigures:
    def test_op(self) -> None:
        cell = {"gemm": "fc2_fprop", "policy_over_plain": 1.1, "none_over_plain": 1.2}
        rows = [
            {**cell, "tokens": 1024, "over_best_peer": 1.01},
            {**cell, "tokens": 4096, "over_best_peer": 0.9},
            {**cell, "tokens": 8192, "over_best_peer": 0.4},
        ]
        made = op.figures(rows)
        assert made["over_best_peer_max"] == 1.01
        assert made["over_best_peer_geomean_t4096"] == pytest.approx(0.6)
        assert made["none_over_plain_geomean"] == pytest.approx(1.2)

    def test_lengths(self) -> None:
        rows = [{"time_over_token_ratio": 1.02}, {"time_over_token_ratio": 0.98, "policy_over_none": 0.7}]
        assert lengths.figures(rows) == {"time_over_token_ratio_max": 1.02, "policy_over_none_max": 0.7}

# SPDX-License-Identifier: Apache-2.0
"""A policy on the host: every switch of every GEMM gives the bits of the chosen configuration used alone."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from host_world import HIDDEN, ROWS, data, started

import ub_dynamic as ubd
from ub_dynamic import api
from ub_dynamic.backends.host import (
    ColumnParallelLinear,
    HostBackend,
    RowParallelLinear,
    all_reduce_sequence_parallel_gradients,
    current_backend,
    get_ub,
)
from ub_dynamic.backends.host.buffers import allocated_bytes, allocation_count
from ub_dynamic.backends.host.communicator import Communicator
from ub_dynamic.backends.host.progress import Transfer
from ub_dynamic.backends.names import DGRAD_REDUCE_SCATTER, GEMM_METHODS, resolve_specs
from ub_dynamic.groups import MPIGroup
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice, Policy

LEAST = 4  # and at least: a pipeline of 8 splits takes 64 * 8 elements
OF_METHOD = {
    "none": [OverlapConfig("none")],
    "bulk": [OverlapConfig("bulk"), OverlapConfig("bulk", num_sm=4)],
    "pipeline": [
        OverlapConfig("pipeline", num_splits=splits, num_sm=8, first_gemm=splits == 2) for splits in (1, 2, 4, 8)
    ],
    "ring_exchange": [OverlapConfig("ring_exchange")],
}
AGGREGATE = [OverlapConfig("ring_exchange", aggregate=value) for value in (False, True)]


def candidates(gemm: str) -> list[OverlapConfig]:
    found = [config for method in GEMM_METHODS[gemm] for config in OF_METHOD[method]]
    gathers = gemm in ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
    return found + AGGREGATE if gathers else found


def random_policy(draw: random.Random, tp: int) -> Policy:
    """Another stage at almost every T; some stages leave some GEMMs as configured."""
    starts = (1, *sorted(draw.sample(range(LEAST + 1, ROWS), 11)))
    stages: list[Mapping[str, Choice]] = []
    for _ in starts:
        named = [gemm for gemm in GEMM_METHODS if draw.random() < 0.9]
        stages.append({gemm: Choice(draw.choice(candidates(gemm)), "drawn") for gemm in named})
    return Policy(tuple(start * tp for start in starts), tuple(map(MappingProxyType, stages)))


class Alone(HostBackend):
    """One stage of a policy as configuration, without any policy: ``plain`` names take plain collectives."""

    def __init__(self, stage: Mapping[str, Choice], cfgs: Mapping[str, Any], group: MPIGroup) -> None:
        merged = {name: dict(cfg) for name, cfg in cfgs.items()}
        self.plain = set()
        for gemm, (config, _) in stage.items():
            if config.method == "none":
                self.plain |= {gemm, DGRAD_REDUCE_SCATTER.get(gemm, gemm)}
                continue
            settings = {name: value for name, value in config.settings().items() if name != "first_gemm"}
            before = merged.get(gemm, {})
            same = before.get("method", _default(gemm)) == config.method
            merged[gemm] = {**(before if same else {}), "method": config.method, **settings}
        capacity = (ROWS * group.size, HIDDEN)
        super().__init__(resolve_specs(capacity, group.size, torch.float32, merged), group)

    def take(self, name: str, tokens: int) -> Communicator | None:
        return None if name in self.plain else super().take(name, tokens)


def _default(gemm: str) -> str:
    return {"qkv_dgrad": "bulk", "fc1_dgrad": "bulk", "proj_fprop": "pipeline", "fc2_fprop": "pipeline"}.get(
        gemm, "ring_exchange"
    )


class Layers(torch.nn.Module):
    """All eight GEMMs."""

    def __init__(self, backend: HostBackend | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv = ColumnParallelLinear(HIDDEN, 128, ub_name="qkv", backend=backend)
        self.proj = RowParallelLinear(128, HIDDEN, ub_name="proj", backend=backend)
        self.fc1 = ColumnParallelLinear(HIDDEN, 192, ub_name="fc1", backend=backend)
        self.fc2 = RowParallelLinear(192, HIDDEN, ub_name="fc2", backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(self.proj(torch.tanh(self.qkv(x))))))


def recorded(backend: HostBackend) -> list[str]:
    """Every transfer that the backend makes from now on, such as "pipeline reduce-scatter on fc2_fprop, block 3"."""
    engine, labels = backend.engine, []
    assert engine is not None
    submit = engine.submit

    def record(transfer: Transfer) -> None:
        label = re.sub(r" \((bulk|pipeline|ring_exchange)\)", "", transfer.label)
        # A plain collective is told under a communicator's name only where there is one.
        labels.append(re.sub(r"^(all-gather|reduce-scatter) on \w+,", r"\1,", label))
        submit(transfer)

    engine.submit = record  # type: ignore[method-assign]
    return labels


def start(layers: Layers, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = data(rows).requires_grad_()
    return layers(leaf), leaf


def finish(
    layers: Layers, out: torch.Tensor, leaf: torch.Tensor, backend: HostBackend | None = None
) -> list[torch.Tensor]:
    layers.zero_grad()
    (out * out).sum().backward()
    all_reduce_sequence_parallel_gradients(layers, backend)
    assert leaf.grad is not None
    return [out.detach(), leaf.grad, *(parameter.grad.clone() for parameter in layers.parameters())]  # type: ignore[union-attr]


CFGS: list[dict[str, Any]] = [
    {},
    {
        "qkv_dgrad": {"method": "ring_exchange"},
        "fc1_dgrad": {"method": "pipeline", "num_splits": 2},
        "proj_fprop": {"method": "ring_exchange"},
        "fc2_fprop": {"num_splits": 8},
        "qkv_fprop": {"aggregate": True},
    },
]


@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize(("seed", "cfgs"), [(0, CFGS[0]), (1, CFGS[1])])
def test_two_hundred_switches_change_no_bit(mpi_comm: Any, seed: int, cfgs: dict[str, Any]) -> None:
    draw = random.Random(seed)
    tp = mpi_comm.Get_size()
    policy = random_policy(draw, tp)
    with started(mpi_comm, policy=policy, ub_cfgs=cfgs):
        backend, layers = current_backend(), Layers()
        switches = 0
        switch = backend.switch

        def counted(plan: Any) -> None:
            nonlocal switches
            switches += 1
            switch(plan)

        backend.switch = counted  # type: ignore[method-assign]
        expected: dict[int, list[torch.Tensor]] = {}
        transfers: dict[int, list[str]] = {}
        for stage in policy.stages:
            alone = Alone(stage, cfgs, MPIGroup(mpi_comm))
            reference, made = Layers(alone), recorded(alone)
            for rows in range(LEAST, ROWS + 1):
                if policy.choices(rows * tp) is stage:
                    alone.apply(rows * tp)
                    expected[rows] = finish(reference, *start(reference, rows), alone)
                    transfers[rows] = made[:]
                    made.clear()
            alone.destroy()
        assert len(expected) == ROWS - LEAST + 1

        def poison() -> None:
            for communicator in backend.communicators.values():
                communicator.poison()

        allocated, waiting, made = allocation_count(), [], recorded(backend)
        while switches < 220:
            rows = draw.randint(LEAST, ROWS)
            poison()
            with ubd.microbatch(rows * tp) as mb:
                assert ubd.set_ub_active_shape(mb.shape).overlap == policy.choices(mb.tokens)
                out, leaf = start(layers, rows)
                waiting.append((rows, mb.bind_backward(out), leaf, made[:]))
                made.clear()
            if len(waiting) > 2:  # three forwards, then the backward of the first one, under its own T and choices
                poison()
                rows, out, leaf, forward = waiting.pop(0)
                found = finish(layers, out, leaf)
                where = f"T = {rows * tp} of {policy.choices(rows * tp)}"
                assert all(map(torch.equal, found, expected[rows])), where
                assert forward + made == transfers[rows], where  # the bits alone do not tell every configuration
                made.clear()
        assert allocation_count() == allocated


@pytest.mark.mpi(2)
def test_alternatives_share_the_memory_of_the_largest(mpi_comm: Any) -> None:
    ring = OverlapConfig("ring_exchange")
    used = []
    for options in (
        {"ub_cfgs": {name: {"method": "ring_exchange"} for name in ("proj_fprop", "fc2_fprop")}},
        {"policy": lambda gemm, tokens: ring if gemm in ("proj_fprop", "fc2_fprop") and tokens < 32 else None},
    ):
        before = allocated_bytes()
        with started(mpi_comm, **options):
            used.append(allocated_bytes() - before)
            if "policy" in options:
                backend = current_backend()
                pipeline, other = backend.communicators["fc2_fprop"], backend.communicators["fc2_fprop (ring_exchange)"]
                assert get_ub("fc2_fprop") is pipeline and not pipeline.is_p2p_overlap()
                ubd.set_ub_active_shape([16, HIDDEN])
                assert get_ub("fc2_fprop") is other and other.is_p2p_overlap()
                assert other.get_buffer().data_ptr() == pipeline.get_buffer().data_ptr()
                ubd.set_buffer_active_shape("fc2_fprop", [8, HIDDEN])
                assert pipeline.tokens == other.tokens == 8
    own = ROWS * HIDDEN * 4  # what a pipeline receives lies beside its buffer, in a ring inside of it
    assert used[1] - used[0] < 2 * own + 256, used


@pytest.mark.mpi(2)
def test_the_policy_of_a_callable_a_file_and_a_plain_step(mpi_comm: Any, ranks_tmp_path: Any) -> None:
    def choose(gemm: str, tokens: int) -> OverlapConfig | None:
        return OverlapConfig("none") if tokens <= 16 else None

    with started(mpi_comm, policy=choose) as tp:
        assert ubd.set_ub_active_shape([64, HIDDEN]).overlap == {}
        report = ubd.set_ub_active_shape([16, HIDDEN])
        assert set(report.overlap) == set(GEMM_METHODS)
        assert report.overlap["qkv_fprop"] == (OverlapConfig("none"), "chosen by the callable")
        with pytest.raises(ubd.UBStateError, match="qkv_fprop is not overlapped at this T"):
            get_ub("qkv_fprop")
        layers = Layers()
        with pytest.raises(ubd.UBShapeError, match="qkv_fprop.*24 tokens, the active shape is 16"):
            layers(data(24 // tp))  # a plain collective would take it, but another T has another choice
        found = finish(layers, *start(layers, 8))
        assert len(found) == 10 and "num_sm" in current_backend().notes


@pytest.mark.mpi(2)
def test_a_living_manager_takes_another_policy_and_none(mpi_comm: Any) -> None:
    """Each with the bits and the transfers of its configurations alone."""
    ring, none = OverlapConfig("ring_exchange"), OverlapConfig("none")
    one: dict[str, Choice] = {"fc2_fprop": Choice(ring, ""), "qkv_dgrad": Choice(none, "")}
    other: dict[str, Choice] = {"fc1_fprop": Choice(none, ""), "fc2_fprop": Choice(none, "")}
    alternatives = Policy((1, 2, 3), (one, other, {}))
    rows = 8
    with started(mpi_comm, policy=alternatives) as tp:
        backend, layers, manager = current_backend(), Layers(), api.manager()
        made = recorded(backend)
        ubd.set_ub_active_shape([rows * tp, HIDDEN])
        for stage in (one, other, {}, one):
            alone = Alone(stage, {}, MPIGroup(mpi_comm))
            transfers = recorded(alone)
            alone.apply(rows * tp)
            reference = Layers(alone)
            expected = finish(reference, *start(reference, rows), alone)
            manager.use_policy(Policy((1,), (stage,)) if stage else None)
            assert ubd.get_ub_active_shape() == (rows * tp, HIDDEN)
            made.clear()
            assert all(map(torch.equal, finish(layers, *start(layers, rows)), expected)), stage
            assert made == transfers, stage
            alone.destroy()
        with pytest.raises(ubd.UBUnsupportedError, match="proj_fprop"):
            manager.use_policy(Policy((1,), ({"proj_fprop": Choice(ring, "")},)))
        assert ubd.set_ub_active_shape([rows * tp, HIDDEN]).overlap == one
        assert get_ub("fc2_fprop").is_p2p_overlap()


@pytest.mark.mpi(2)
def test_auto_switches_with_the_first_operand(mpi_comm: Any) -> None:
    ring, none = OverlapConfig("ring_exchange"), OverlapConfig("none")
    policy = Policy((1, 20), ({"fc2_fprop": Choice(ring, "small"), "qkv_dgrad": Choice(none, "small")}, {}))
    with started(mpi_comm, policy=policy, auto=True) as tp:
        layers = Layers()
        outs = [(rows, *start(layers, rows)) for rows in (8, 16, 4)]
        assert get_ub("fc2_fprop").is_p2p_overlap() and ubd.get_ub_active_shape() == (4 * tp, HIDDEN)
        found = {rows: finish(layers, out, leaf) for rows, out, leaf in outs}
    with started(mpi_comm, policy=policy):
        layers = Layers()
        for rows, tensors in found.items():
            with ubd.microbatch(rows * tp):
                assert all(map(torch.equal, tensors, finish(layers, *start(layers, rows))))

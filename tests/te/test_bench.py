# SPDX-License-Identifier: Apache-2.0
"""What is timed on GPUs, through TE's real layers on the host: every candidate of every GEMM, and the GEMM alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_te import CAPACITY, HIDDEN, TP
from policy_te import te_world

from ub_dynamic.bench.candidates import candidates, default_of
from ub_dynamic.bench.operations import GEMMS
from ub_dynamic.bench.peers import built_with_cublasmp
from ub_dynamic.bench.subject import Operation, Switched, probing
from ub_dynamic.bench.worlds import WARM, TEWorld
from ub_dynamic.manager import Manager

FFN = 2 * HIDDEN
TOKENS = 128


class Event:
    """``torch.cuda.Event`` without a device."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[], TEWorld]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: TP)
    ranks: Any = SimpleNamespace(rank=0, size=TP, device="cpu", tp_group=object(), gather=lambda value: [value])
    return lambda: TEWorld(ranks, f"{TP}-gpus")


@pytest.mark.parametrize("name", GEMMS)
def test_every_candidate_overlaps_as_it_says(
    name: str, world: Callable[[], TEWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm = GEMMS[name]
    configs = candidates(gemm, TP, HIDDEN, "te")
    with te_world(monkeypatch, probing({name: configs}).configurations()) as te:
        manager = Manager(te.backend, (CAPACITY, HIDDEN), check="never", guard=False)
        manager.set_active_shape((TOKENS, HIDDEN))
        switched = Switched(manager, gemm, Operation(world(), gemm, HIDDEN, FFN, CAPACITY))
        for config in (None, *configs, default_of(name, None, "te")):
            te.calls.clear()
            assert switched.block(config, TOKENS, 3) == pytest.approx(1.0 if gemm.backward else 1 / 3)
            mine = [one for one in te.overlaps() if one.split()[0] in (name, name.replace("dgrad", "wgrad"))]
            if config is None or config.method != "none":
                wgrad = gemm.backward and gemm.column and (config is None or config.method == "bulk")
                assert len(mine) == (2 if wgrad else 1) * (WARM + 3), (str(config), mine)
            else:
                assert not mine
        te.calls.clear()
        Operation(world(), gemm, HIDDEN, FFN, CAPACITY, plain=True).block(TOKENS, 1)
        assert te.overlaps() == []
        del manager, switched


def test_this_build_says_whether_it_has_cublasmp() -> None:
    assert built_with_cublasmp() in (True, False)

# SPDX-License-Identifier: Apache-2.0
"""A refusal in one TP group reaches all others, which would wait for it in TE's constructor."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

import ub_dynamic as ub
from ub_dynamic import api
from ub_dynamic.groups import TorchGroup, tensor_parallel_group
from ub_dynamic.readiness import Readiness

pytestmark = [pytest.mark.mpi(4, launcher="torchrun"), pytest.mark.usefixtures("gloo_world")]


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of TE as far as it can be walked without it; what was reached."""
    reached: list[str] = []

    def create(*arguments: Any) -> Any:
        if dist.get_rank() == 1 and arguments[5] is not None:
            raise ub.UBUnsupportedError("this node has no compiler")
        arguments[-1]()
        reached.append("TE's constructor")
        raise RuntimeError("there is no TE here")

    monkeypatch.setattr(api, "choose_backend", lambda backend: "te")
    monkeypatch.setattr(api, "_create_te", create)
    return reached


def test_all_are_ready(te: list[str]) -> None:
    with pytest.raises(RuntimeError, match="there is no TE here"):
        ub.initialize_ub([64, 64], 2)
    assert te == ["TE's constructor"]


def test_arguments_that_one_group_refuses(te: list[str]) -> None:
    rank = dist.get_rank()
    text = "refused on rank 2: .*; rank 3: .*" if rank < 2 else "capacity shape"
    with pytest.raises(ub.UBRankMismatchError if rank < 2 else ub.UBShapeError, match=text):
        ub.initialize_ub([64, 64] if rank < 2 else [64], 2)
    assert te == []


def test_a_rank_that_cannot_go_on_after_its_group_agreed(te: list[str]) -> None:
    text = "this node has no compiler" if dist.get_rank() == 1 else "refused on rank 1: this node has no compiler"
    with pytest.raises(ub.UBDynamicError, match=text):
        ub.initialize_ub([64, 64], 2, ub_cfgs={}, bootstrap_backend="gloo")
    assert te == []


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ub_dynamic.readiness.bootstrap_timeout_s", lambda: 2.0)
    group = tensor_parallel_group(2)
    assert isinstance(group, TorchGroup) and group.world is not None
    if dist.get_rank() == 3:
        time.sleep(4)
    else:
        text = "Ranks 3 failed" if dist.get_rank() == 0 else "did not finish telling all ranks"
        with pytest.raises(ub.UBTimeoutError, match=text), Readiness(group.world) as ready:
            ready.confirm()
    dist.barrier()
    group.close()

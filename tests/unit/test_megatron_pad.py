# SPDX-License-Identifier: Apache-2.0
"""The pad flag on a dataclass like that of newer Megatrons, and configurations that are refused; no Megatron needed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ub_dynamic import PackedBatch, UBShapeError, UBStateError, UBUnsupportedError
from ub_dynamic.cp.current import packed
from ub_dynamic.integrations.megatron import check_config
from ub_dynamic.integrations.megatron.pad import PadFlags


@dataclass
class Params:
    """The fields of ``PackedSeqParams`` of megatron-core 0.19 that matter here."""

    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    cu_seqlens_q_padded: Any
    cu_seqlens_kv_padded: Any
    qkv_format: str | None = "thd"
    local_cp_size: int | None = None
    cp_group: Any = None
    pad_between_seqs: bool | None = None


CONFIG = SimpleNamespace(context_parallel_size=2)


def four(real: list[int], rows: list[int]) -> Params:
    q, kv = torch.tensor(real), torch.tensor(real)
    return Params(q, kv, torch.tensor(rows), torch.tensor(rows))


@pytest.mark.parametrize(("rows", "flag"), [([0, 8, 16], True), ([0, 6, 12], False)])
def test_distinct_tensors_are_read_once(rows: list[int], flag: bool) -> None:
    flags, params = PadFlags(Params, "sync_once"), four([0, 6, 12], rows)
    flags.fill(params, rows[-1] // 2, CONFIG)
    assert params.pad_between_seqs is flag


def test_shared_tensors_are_not_padded() -> None:
    one = torch.tensor([0, 8, 16])
    params = Params(one, one, one, one)
    PadFlags(Params, "error").fill(params, 8, CONFIG)
    assert params.pad_between_seqs is False


def test_what_the_caller_said_stays() -> None:
    params = four([0, 6, 12], [0, 8, 16])
    params.pad_between_seqs = False
    PadFlags(Params, "error").fill(params, 8, CONFIG)
    assert params.pad_between_seqs is False


def test_unknown_tensors_by_policy() -> None:
    params = four([0, 8], [0, 8])
    PadFlags(Params, "conservative").fill(params, 4, CONFIG)
    assert params.pad_between_seqs is True
    with pytest.raises(UBStateError, match="pad_between_seqs is not known"):
        PadFlags(Params, "error").fill(four([0, 8], [0, 8]), 4, CONFIG)


def test_a_registered_batch_knows_and_its_tail_is_checked() -> None:
    batch = PackedBatch.from_lengths([6, 8], cp=2, tail="extend_last")
    with packed(batch):
        params = four([0, 6, 14], [0, 8, 16])
        PadFlags(Params, "error").fill(params, batch.local_tokens, CONFIG)
        assert params.pad_between_seqs is True
        with pytest.raises(UBShapeError, match="belongs to no sequence"):
            PadFlags(Params, "error").fill(four([0, 6, 14], [0, 8, 16]), batch.local_tokens + 4, CONFIG)


@pytest.mark.parametrize(("group", "local"), [(SimpleNamespace(size=lambda: 4), None), (None, 1)])
def test_a_microbatch_may_have_its_own_context_parallel_group(group: Any, local: int | None) -> None:
    rows = 16 // (4 if group else 1)
    params = four([0, 6, 16], [0, 8, 16])
    params.cp_group, params.local_cp_size = group, local
    PadFlags(Params, "sync_once").fill(params, rows, CONFIG)
    assert params.pad_between_seqs is True


def test_microbatches_without_boundaries_are_left_alone() -> None:
    PadFlags(Params, "error").fill(None, 8, CONFIG)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"overlap_moe_expert_parallel_comm": True}, "one process has one active shape"),
        ({"delay_wgrad_compute": True}, "weight gradients are computed after"),
        ({"enable_cuda_graph": True}, "graph_decoder"),
        ({"external_cuda_graph": True}, "graph_decoder"),
        ({"cuda_graph_impl": "transformer_engine"}, "graph_decoder"),
    ],
)
def test_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UBUnsupportedError, match=reason) as raised:
        check_config(SimpleNamespace(tp_comm_overlap=True, **settings))
    assert next(iter(settings)) in str(raised.value)
    check_config(SimpleNamespace(tp_comm_overlap=False, **settings))


def test_what_can_be_is_not_refused() -> None:
    check_config(SimpleNamespace(tp_comm_overlap=True, cuda_graph_impl="none", delay_wgrad_compute=False))
    check_config(SimpleNamespace())

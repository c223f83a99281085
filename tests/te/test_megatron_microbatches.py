# SPDX-License-Identifier: Apache-2.0
"""Lengths to Megatron's packed microbatches: padding, labels, positions and the share of each context-parallel rank."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from ub_dynamic import PackedBatch, UBCapacityError, UBShapeError, UBStateError, api
from ub_dynamic.cp.partition import Partition
from ub_dynamic.integrations.megatron import Microbatch, plan_batches

pytestmark = pytest.mark.te


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 4)])
def test_every_microbatch_is_one_that_megatron_takes(tp: int, cp: int) -> None:
    lengths = [3, 17, 64, 5, 40, 1, 33, 20]
    plan = plan_batches(lengths, 128, tp=tp, cp=cp)
    assert sorted(index for each in plan for index in each.documents) == list(range(len(lengths)))
    for each in plan:
        batch = each.batch
        assert batch.total_tokens <= 128
        assert batch.local_tokens % tp == 0
        assert cp == 1 or all(rows % (2 * cp) == 0 for rows in batch.padded)
        assert batch.cu_seqlens_padded[-1] == batch.total_tokens


def test_sizes_and_capacity_come_from_megatron_and_the_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    with pytest.raises(UBStateError, match="max_tokens is not given"):
        plan_batches([8])
    monkeypatch.setattr(api, "is_ub_initialized", lambda: True)
    monkeypatch.setattr(api, "token_multiple", lambda: 16)
    monkeypatch.setattr(api, "max_tokens", lambda: 64)
    plan = plan_batches([100, 20, 60])
    assert plan.max_tokens == 128  # of two context-parallel ranks
    assert all(each.batch.local_tokens % 16 == 0 for each in plan)
    with pytest.raises(UBCapacityError, match="129 tokens"):
        plan_batches([129])


def test_without_megatron_the_sizes_are_asked_for() -> None:
    with pytest.raises(UBStateError, match="tp is not given, and Megatron is not initialised"):
        plan_batches([8], 16)


def test_rows_of_a_microbatch() -> None:
    batch = PackedBatch.from_lengths([3, 2], tp=2, align=4, tail="extend_last")
    documents = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    labels = [torch.tensor([6, 7, -100]), torch.tensor([9, -100])]
    made = Microbatch.pack(batch, documents, labels, "cpu", fill=1)
    assert made.tokens.tolist() == [[5, 6, 7, 8, 9, 1, 1, 1]]
    assert made.labels.tolist() == [[6, 7, 1, 9, 1, 1, 1, 1]]
    assert made.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0, 0, 0]]
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert isinstance(made.packed_seq_params, PackedSeqParams)
    assert made.packed_seq_params.cu_seqlens_q_padded.tolist() == [0, 3, 8]
    assert made.masked_sum(torch.tensor([[1.0, 2, 9, 4, 9, 9, 9, 9]])) == 7
    assert set(made.forward_arguments()) == {
        "input_ids", "position_ids", "attention_mask", "labels", "packed_seq_params",
    }  # fmt: skip


def test_context_parallel_ranks_share_the_rows() -> None:
    batch = PackedBatch.from_lengths([5, 8], cp=2)
    documents = [torch.arange(5), torch.arange(10, 18)]
    parts = [Microbatch.pack(batch, documents, documents, "cpu", cp_rank=rank) for rank in range(2)]
    assert all(part.tokens.shape == (1, batch.local_tokens) for part in parts)
    joined = torch.cat([part.position_ids[0] for part in parts])[Partition.zigzag().inverse(batch)]
    assert joined.tolist() == [*range(8), *range(8)]
    assert sum(float(part.loss_mask.sum()) for part in parts) == batch.real_tokens
    with pytest.raises(UBShapeError, match=r"cp_rank = 2: it must be in 0 \.\. 1"):
        Microbatch.pack(batch, documents, documents, "cpu", cp_rank=2)


def documents_of(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(length) for length in lengths]


def test_documents_must_fit() -> None:
    batch = PackedBatch.from_lengths([3])
    with pytest.raises(UBShapeError, match="documents"):
        Microbatch.pack(batch, documents_of(4), documents_of(4), "cpu")

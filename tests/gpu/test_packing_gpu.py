# SPDX-License-Identifier: Apache-2.0
"""Packed batches on a real device: no synchronisation, capture refused, and TE's own kernels agree on a rank's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ub_dynamic.cp.partition import Partition
from ub_dynamic.cp.rope import rope_kwargs, table_rows
from ub_dynamic.errors import UBStateError
from ub_dynamic.packing import PackedBatch

pytestmark = pytest.mark.gpu

LENGTHS = [[2048, 4096, 1024, 1024], [698], [13, 40, 7, 1, 0], [64] * 100]


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_metadata_without_a_synchronisation(lengths: list[int], no_sync: None) -> None:
    batch = PackedBatch.from_lengths(lengths, cp=4, tp=2, align=8)
    kwargs = batch.dpa_kwargs("cuda")
    rope = rope_kwargs(batch, Partition.contiguous(), 3, "cuda")
    assert batch.device_metadata("cuda") is batch.device_metadata(f"cuda:{torch.cuda.current_device()}")
    torch.cuda.set_sync_debug_mode("default")
    assert kwargs["cu_seqlens_q"].tolist() == list(batch.cu_seqlens)
    assert kwargs["cu_seqlens_kv_padded"].tolist() == list(batch.cu_seqlens_padded)
    assert rope["start_positions"].tolist() == [3 * rows // 4 for rows in batch.padded]


def test_capture_takes_what_was_copied_before_and_refuses_the_rest() -> None:
    ready, late = PackedBatch.from_lengths([5, 9]), PackedBatch.from_lengths([6, 8])
    ready.dpa_kwargs("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        boundaries = ready.dpa_kwargs("cuda")["cu_seqlens_q"] + 0
        with pytest.raises(UBStateError, match="during CUDA graph capture"):
            late.dpa_kwargs("cuda")
    graph.replay()
    assert boundaries.tolist() == [0, 5, 14]


def test_a_device_tensor_is_read_only_on_request() -> None:
    boundaries = torch.tensor([0, 8, 16], dtype=torch.int32, device="cuda")
    assert PackedBatch.from_cu_seqlens(boundaries, cp=2, allow_sync=True).seqlens == (8, 8)


@pytest.mark.te
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_zigzag_is_the_split_of_te(lengths: list[int], cp: int) -> None:
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    batch = PackedBatch.from_lengths(lengths, cp=cp, tp=2, align=8)
    boundaries = batch.device_metadata("cuda").cu_seqlens_padded
    for rank in range(cp):
        theirs = tex.thd_get_partitioned_indices(boundaries, batch.total_tokens, cp, rank)
        assert theirs.tolist() == Partition.zigzag().indices(batch, rank).tolist()


@pytest.mark.te
@pytest.mark.parametrize("partition", [Partition.zigzag(), Partition.contiguous()], ids=lambda each: each.name)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_fused_rope_turns_by_the_positions(lengths: list[int], partition: Partition) -> None:
    import transformer_engine.pytorch  # noqa: F401
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    batch = PackedBatch.from_lengths(lengths, cp=4, align=8)
    freqs = torch.rand(batch.max_seqlen, 1, 1, 64, device="cuda")
    for rank in range(4):
        x = torch.rand(batch.local_tokens, 2, 64, device="cuda")
        got = apply_rotary_pos_emb(x, freqs, **rope_kwargs(batch, partition, rank, "cuda"))
        angles = table_rows(batch, partition, rank, freqs.view(-1, 64)).unsqueeze(1)
        turned = torch.cat([-x[..., 32:], x[..., :32]], dim=-1)
        torch.testing.assert_close(got, x * angles.cos() + turned * angles.sin())


@pytest.mark.te
def test_ghosts_change_no_document() -> None:
    import transformer_engine.pytorch as te

    lengths = [100, 28, 300]
    torch.manual_seed(0)
    attention = te.DotProductAttention(8, 64, qkv_format="thd", attn_mask_type="padding_causal")
    documents = [[torch.randn(n, 8, 64, device="cuda", dtype=torch.bfloat16) for n in lengths] for _ in range(3)]
    outputs: list[list[torch.Tensor]] = []
    layouts: list[dict[str, Any]] = [{}, {"bucket": 1024}, {"bucket": 1024, "tail": "ghost_padding"}]
    for layout in layouts:
        batch = PackedBatch.from_lengths(lengths, **layout)
        q, k, v = (batch.pack(each, fill=1.0) for each in documents)
        outputs.append(batch.unpack(attention(q, k, v, **batch.dpa_kwargs("cuda"))))
    for other in outputs[1:]:
        for document, expected in zip(other, outputs[0], strict=True):
            torch.testing.assert_close(document, expected, rtol=2.5e-2, atol=2.5e-2)

# SPDX-License-Identifier: Apache-2.0
"""What a packed batch hands on: one copy to a device, and what TE and Megatron take of it."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ub_dynamic.errors import UBCapacityError, UBStateError, UBUnsupportedError
from ub_dynamic.metadata import MAX_CP_SEQUENCES
from ub_dynamic.packing import PackedBatch


class Operations(TorchDispatchMode):
    """Records what is dispatched: copies to a device, and reads from one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [[8, 16, 8], [5, 16, 7]])
def test_one_copy_shared_by_q_and_kv_and_nothing_read_back(lengths: list[int]) -> None:
    batch = PackedBatch.from_lengths(lengths, cp=2, tp=2)
    with Operations() as operations:  # "meta" stands for a device: a read from it would raise
        first = batch.dpa_kwargs("meta")
        again = batch.dpa_kwargs("meta", causal=False)
    assert operations.names.count("_to_copy") == 1, operations.names
    assert not {"_local_scalar_dense", "equal", "item", "is_nonzero"} & set(operations.names)
    assert first["cu_seqlens_q"] is first["cu_seqlens_kv"] is again["cu_seqlens_q"]
    assert first["cu_seqlens_q_padded"] is first["cu_seqlens_kv_padded"]
    assert (first["cu_seqlens_q_padded"] is first["cu_seqlens_q"]) == (not batch.has_padding)
    assert first["pad_between_seqs"] == batch.has_padding
    assert (first["attn_mask_type"], again["attn_mask_type"]) == ("padding_causal", "padding")


@pytest.mark.parametrize("lengths", [[8, 16, 8], [5, 16, 7]])
def test_values_on_the_device(lengths: list[int]) -> None:
    batch = PackedBatch.from_lengths(lengths, cp=2, tp=2)
    kwargs = batch.dpa_kwargs("cpu")
    assert kwargs["cu_seqlens_q"].tolist() == list(batch.cu_seqlens)
    assert kwargs["cu_seqlens_q_padded"].tolist() == list(batch.cu_seqlens_padded)
    assert kwargs["cu_seqlens_q"].dtype == kwargs["cu_seqlens_q_padded"].dtype == torch.int32
    assert kwargs["cu_seqlens_q"].is_contiguous() and kwargs["cu_seqlens_q_padded"].is_contiguous()
    assert kwargs["max_seqlen_q"] == kwargs["max_seqlen_kv"] == 16 and kwargs["qkv_format"] == "thd"
    assert batch.device_metadata("cpu") is batch.device_metadata(torch.device("cpu"))


def test_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    batch = PackedBatch.from_lengths([8])
    with pytest.raises(UBStateError, match="during CUDA graph capture: call the same method once before"):
        batch.device_metadata("cuda:0")


def test_more_than_te_can_index_is_refused() -> None:
    PackedBatch.from_lengths([1] * (MAX_CP_SEQUENCES + 1)).dpa_kwargs("cpu")
    many = PackedBatch.from_lengths([1] * (MAX_CP_SEQUENCES + 1), cp=2)
    with pytest.raises(
        UBCapacityError, match=f"{MAX_CP_SEQUENCES + 1} sequences.*number of sequences is {MAX_CP_SEQUENCES}"
    ):
        many.dpa_kwargs("cpu")
    with pytest.raises(UBCapacityError, match=r"T = 2147483648: .*below 2\^31"):
        PackedBatch.from_lengths([2**31]).to_megatron("cpu")


def megatron(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Install a PackedSeqParams that has these fields."""
    module = ModuleType("megatron.core.packed_seq_params")
    fields = [(name, Any, dataclasses.field(default=None)) for name in names]
    module.PackedSeqParams = dataclasses.make_dataclass("PackedSeqParams", fields)  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


OLD = ["qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"]
PADDED = ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"]


def test_megatron_of_any_age(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, padded = (PackedBatch.from_lengths([length], cp=2) for length in (8, 7))
    megatron(monkeypatch, *OLD, *PADDED, "local_cp_size", "total_tokens", "pad_between_seqs")
    new = padded.to_megatron("cpu")
    assert new.pad_between_seqs is True and new.total_tokens is None and new.local_cp_size is None
    assert new.cu_seqlens_q.tolist() == [0, 7] and new.cu_seqlens_kv_padded.tolist() == [0, 8]
    assert plain.to_megatron("cpu").pad_between_seqs is False
    megatron(monkeypatch, *OLD)
    assert plain.to_megatron("cpu").max_seqlen_q == 8
    with pytest.raises(UBUnsupportedError, match="no PackedSeqParams.cu_seqlens_kv_padded, cu_seqlens_q_padded"):
        padded.to_megatron("cpu")
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", None)
    with pytest.raises(UBUnsupportedError, match="pip install megatron-core"):
        plain.to_megatron("cpu")


@pytest.mark.te
def test_te_takes_every_argument() -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    taken = inspect.signature(te.DotProductAttention.forward).parameters
    assert set(PackedBatch.from_lengths([7], cp=2).dpa_kwargs("cpu")) <= set(taken)

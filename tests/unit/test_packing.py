# SPDX-License-Identifier: Apache-2.0
"""PackedBatch: rules and tails against a search, known answers, errors and their texts."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ub_dynamic.errors import UBAlignmentError, UBCapacityError, UBShapeError, UBUnsupportedError
from ub_dynamic.packing import PackedBatch
from ub_dynamic.packing_rules import GHOST_TOKENS, MAX_GHOSTS, TAILS


def valid(total: int, tp: int, cp: int, align: int) -> bool:
    """The rules for T, one by one."""
    if cp > 1 and total % (2 * cp):
        return False
    return total % cp == 0 and (total // cp) % tp == 0 and (total // cp) % align == 0


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=6))
    assume(sum(lengths))
    return lengths, {
        "tp": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "cp": draw(st.sampled_from([1, 2, 3, 4])),
        "align": draw(st.sampled_from([1, 2, 6, 8, 64])),
    }


@settings(max_examples=500, deadline=None)
@given(layouts(), st.sampled_from(["ghost", "ghost_padding", "extend_last"]), st.booleans(), st.data())
def test_layout_is_valid_and_no_larger_than_it_must_be(
    layout: tuple[list[int], dict[str, Any]], tail: Any, bucketed: bool, data: st.DataObject
) -> None:
    lengths, sizes = layout
    tp, cp = sizes["tp"], sizes["cp"]
    unit = 2 * cp if cp > 1 else 1
    filled = sum(-(-length // unit) * unit for length in lengths)
    smallest = next(t for t in range(filled, filled + 10**5) if valid(t, **sizes))
    expected, extra = smallest, {}
    if bucketed:
        multiple = next(t for t in range(1, 10**6) if valid(t, **sizes))
        bucket = multiple * data.draw(st.integers(1, 3))
        capacity = smallest + data.draw(st.integers(0, 3 * bucket))
        reachable = [t for t in range(smallest, capacity + 1) if valid(t, **sizes)]
        expected = min([t for t in reachable if t % bucket == 0] or [reachable[-1]])
        extra = {"bucket": bucket, "capacity": capacity}
    batch = PackedBatch.from_lengths(lengths, **sizes, tail=tail, **extra)
    count = len(lengths)

    assert batch.total_tokens == expected == batch.cu_seqlens_padded[-1] == sum(batch.padded)
    assert batch.local_tokens * cp == expected and batch.local_tokens % tp == 0
    assert all(rows % unit == 0 for rows in batch.padded)
    assert batch.documents == count and batch.seqlens[:count] == tuple(lengths)
    assert batch.real_tokens == sum(lengths)
    assert batch.padding_fraction == pytest.approx(1 - sum(lengths) / expected)
    assert batch.max_seqlen == max(batch.padded) and batch.max_seqlen % unit == 0
    assert (
        batch.pad_between_seqs
        == batch.has_padding
        == any(real != rows for real, rows in zip(batch.seqlens, batch.padded, strict=True))
    )
    documents_padded = any(length % unit for length in lengths)
    ghosts = list(zip(batch.seqlens[count:], batch.padded[count:], strict=True))
    if tail == "extend_last":
        assert not ghosts and batch.real_rows_end == expected
    else:
        assert sum(rows for _, rows in ghosts) == expected - filled == expected - batch.real_rows_end
        assert all(0 < rows <= GHOST_TOKENS + unit for _, rows in ghosts)
        attend = tail == "ghost" and not documents_padded
        assert all(real == (rows if attend else 0) for real, rows in ghosts)
        assert batch.has_padding == (documents_padded or (tail == "ghost_padding" and bool(ghosts)))


@settings(max_examples=300, deadline=None)
@given(layouts(), st.sampled_from(TAILS), st.sampled_from([list, np.array, torch.tensor, tuple]))
def test_boundaries_describe_the_same_layout(
    layout: tuple[list[int], dict[str, Any]], tail: Any, form: Callable[[Any], Any]
) -> None:
    lengths, sizes = layout
    made = PackedBatch.from_lengths(lengths, **sizes)
    read = PackedBatch.from_cu_seqlens(form(made.cu_seqlens), form(made.cu_seqlens_padded), **sizes, tail=tail)
    assert (read.seqlens, read.padded, read.max_seqlen) == (made.seqlens, made.padded, made.max_seqlen)
    assert read.documents == len(made.seqlens), "boundaries do not tell ghosts apart"
    if tail == "error":
        made_from_tensor = PackedBatch.from_lengths(torch.tensor(lengths), **sizes)
        assert made_from_tensor == made and hash(made_from_tensor) == hash(made)


@pytest.mark.parametrize("kind", [np.int64, np.int32, torch.tensor])
def test_counts_may_be_integers_of_other_kinds(kind: Callable[[int], Any]) -> None:
    counts = {"tp": 2, "cp": 2, "align": 4, "capacity": 64, "slots": 3, "max_seqlen": 48}
    others = {name: kind(count) for name, count in counts.items()}
    made = PackedBatch.from_lengths([21, 9], **counts, bucket=16)
    batch = PackedBatch.from_lengths([21, 9], **others, bucket=kind(16))
    read = PackedBatch.from_cu_seqlens(
        made.cu_seqlens[:3], made.cu_seqlens_padded[:3], **others, total_tokens=kind(made.total_tokens)
    )
    facts = {**dataclasses.asdict(made), **{name: others[name] for name in ("tp", "cp", "align", "capacity")}}
    facts |= {"seqlens": np.array(made.seqlens), "documents": kind(2), "max_seqlen": kind(48)}
    for same in (batch, read, PackedBatch(**facts)):
        assert same == made and hash(same) == hash(made)
        values = [value for name, value in dataclasses.asdict(same).items() if name not in ("seqlens", "padded")]
        assert {type(value) for value in (*values, *same.seqlens)} == {int}


def test_known_answers() -> None:
    one = PackedBatch.from_lengths([698], cp=4)
    assert (one.padded, one.max_seqlen, one.pad_between_seqs) == ((704,), 704, True), "only the last entry is padded"
    equal = PackedBatch.from_lengths([2048, 4096, 1024, 1024], cp=4, tp=4, align=8)
    assert equal.total_tokens == 8192 and not equal.pad_between_seqs and equal.documents == 4
    # The sum of 12 is a multiple of tp = 4, yet its half on a CP rank is not.
    assert PackedBatch.from_lengths([12], cp=2, tp=4).padded == (12, 4)
    assert PackedBatch.from_lengths([5, 0, 8], cp=2).cu_seqlens == (0, 5, 5, 13)
    assert PackedBatch.from_lengths([5, 0, 8], cp=2).cu_seqlens_padded == (0, 8, 8, 16)
    assert PackedBatch.from_lengths([5, 9], align=16).padded == (5, 9, 2), "no context parallelism, no padding"


def test_a_tail_that_the_tensors_have_already() -> None:
    batch = PackedBatch.from_cu_seqlens([0, 8, 16], total_tokens=32, cp=2)
    assert batch.padded == (8, 8, 16) and not batch.has_padding and batch.documents == 2
    batch = PackedBatch.from_cu_seqlens([0, 7, 15], [0, 8, 16], total_tokens=32, cp=2)
    assert batch.seqlens == (7, 8, 0) and batch.has_padding
    assert PackedBatch.from_cu_seqlens([0, 8, 16], total_tokens=32, cp=2, tail="extend_last").padded == (8, 24)


def test_slots_and_max_seqlen_make_keys_equal() -> None:
    fixed = {"cp": 2, "bucket": 64, "slots": 8, "max_seqlen": 64}
    one, other = (PackedBatch.from_lengths(lengths, **fixed) for lengths in ([8, 16], [4, 40, 12]))
    assert one != other and one.shape_key("zigzag") == other.shape_key("zigzag") != one.shape_key("contiguous")
    assert len(one.padded) == 8 and one.padded[-1] == 0 and one.total_tokens == 64
    assert one.shape_key() != PackedBatch.from_lengths([7, 16], **fixed).shape_key(), "a graph bakes the pad flag in"
    # Few free slots: the tail comes in few pieces; max_seqlen bounds them.
    assert PackedBatch.from_lengths([8], bucket=2000, slots=3).padded == (8, 996, 996)
    assert max(PackedBatch.from_lengths([8], bucket=2000, max_seqlen=50).padded) == 50
    assert len(PackedBatch.from_lengths([8], bucket=10**6).padded) <= MAX_GHOSTS + 1


def test_frozen_hashable_picklable_without_its_tensors() -> None:
    batch = PackedBatch.from_lengths([5, 9], cp=2, tp=2, capacity=64)
    batch.device_metadata("cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.cp = 3  # type: ignore[misc]
    assert len({batch, PackedBatch.from_lengths((5, 9), cp=2, tp=2, capacity=64)}) == 1
    for twin in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert twin == batch and hash(twin) == hash(batch)
        assert twin.device_metadata("cpu") is not batch.device_metadata("cpu")
    assert b"torch" not in pickle.dumps(batch)


def test_pack_and_unpack() -> None:
    batch = PackedBatch.from_lengths([3, 0, 2], cp=2, align=8)
    documents = [torch.arange(n * 2, dtype=torch.float64).view(n, 2) + 10 * n for n in (3, 0, 2)]
    packed = batch.pack(documents, fill=-1)
    assert packed.shape == (16, 2) and packed.dtype == torch.float64
    for document, rows in zip(documents, batch.unpack(packed), strict=True):
        assert torch.equal(document, rows)
        assert rows.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr(), "a copy, not a view"
    assert int((packed == -1).sum()) == 2 * (16 - 5)
    with pytest.raises(UBShapeError, match=r"documents\[2\] has shape \(3, 2\), expected \(2, 2\)"):
        batch.pack([documents[0], documents[1], documents[0]])
    with pytest.raises(UBShapeError, match="got 2 tensors, the batch has 3 documents"):
        batch.pack(documents[:2])
    with pytest.raises(UBShapeError, match=r"documents\[1\] is a ndarray, not a tensor"):
        batch.pack([documents[0], documents[1].numpy(), documents[2]])
    with pytest.raises(UBShapeError, match="got 15 rows: this batch has T = 16"):
        batch.unpack(packed[:15])


def test_gradients_go_through_pack() -> None:
    batch = PackedBatch.from_lengths([3, 2], align=8)
    documents = [torch.ones(n, requires_grad=True) for n in (3, 2)]
    (batch.pack(iter(documents), fill=7) * torch.arange(8)).sum().backward()
    assert [document.grad.tolist() for document in documents] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("lengths", [np.array(3), 3, None, [np.array([1, 2])], [1.5], "12"])
def test_what_are_no_lengths(lengths: Any) -> None:
    with pytest.raises(UBShapeError, match="lengths must"):
        PackedBatch.from_lengths(lengths)


def make(*sizes: Any, **kwargs: Any) -> Callable[[], PackedBatch]:
    return lambda: PackedBatch.from_lengths(*sizes, **kwargs)


def boundaries(*sizes: Any, **kwargs: Any) -> Callable[[], PackedBatch]:
    return lambda: PackedBatch.from_cu_seqlens(*sizes, **kwargs)


@pytest.mark.parametrize(
    ("call", "error", "texts"),
    [
        (make([]), UBShapeError, ["lengths is empty", "at least one document"]),
        (make([3, -1]), UBShapeError, ["lengths[1] = -1", "at least 0"]),
        (make([3.0]), UBShapeError, ["lengths must hold ints", "float"]),
        (make([3, True]), UBShapeError, ["got a bool at index 1"]),
        (make("35"), UBShapeError, ["sequence of ints", "'35'"]),
        (make(35), UBShapeError, ["sequence of ints", "35"]),
        (make(torch.tensor([3.0])), UBShapeError, ["1-D and hold integers", "float32"]),
        (make(torch.tensor([[3]])), UBShapeError, ["1-D and hold integers", "(1, 1)"]),
        (make([0, 0]), UBShapeError, ["T = 0: 2 sequence(s) of length 0", "must be positive", "all ranks"]),
        (make([3], tp=0), UBShapeError, ["tp = 0", "at least 1"]),
        (make([3], cp=-2), UBShapeError, ["cp = -2", "at least 1"]),
        (make([3], align=1.5), UBShapeError, ["align = 1.5", "an int of at least 1"]),
        (make([3], capacity=True), UBShapeError, ["capacity = True", "an int of at least 1"]),
        (make([3], bucket=np.array([8, 8])), UBShapeError, ["bucket = array([8, 8])", "an int of at least 1"]),
        (lambda: PackedBatch((4,), (4,), 1, 4, tp=True), UBShapeError, ["tp = True", "an int of at least 1"]),
        (make([3], slots=0), UBShapeError, ["slots = 0", "at least 1"]),
        (make([3], tail="crop"), UBShapeError, ["tail = 'crop'", "ghost, ghost_padding, extend_last, error"]),
        (
            make([9], cp=2, tp=4, align=8, tail="error"),
            UBAlignmentError,
            ["T = 12", "the next one is 16", "tail='ghost'", "4 rows"],
        ),
        (
            make([100], capacity=64, align=16),
            UBCapacityError,
            ["T = 112", "capacity of 64", "largest valid T is 64", "multiple of 16"],
        ),
        (make([62], cp=2, capacity=63), UBCapacityError, ["T = 64", "capacity of 63", "largest valid T is 60"]),
        (
            make([8], cp=2, tp=2, bucket=10),
            UBAlignmentError,
            ["bucket = 10", "the lcm of 2*cp = 4, cp*tp = 4, cp*align = 2", "next valid bucket is 12"],
        ),
        (make([8, 8], slots=1), UBCapacityError, ["slots = 1", "2 documents and 0 ghost", "valid value is 2"]),
        (make([8, 8], align=32, slots=2), UBCapacityError, ["slots = 2", "1 ghost", "next valid value is 3"]),
        (
            make([8, 30], cp=2, max_seqlen=30),
            UBShapeError,
            ["max_seqlen = 30", "a multiple of 4", "sequence, 32", "next valid value is 32"],
        ),
        (make([8, 30], max_seqlen=20), UBShapeError, ["max_seqlen = 20", "sequence, 30", "next valid value is 30"]),
        (boundaries([1, 4]), UBShapeError, ["cu_seqlens starts [1, 4]", "start with 0"]),
        (boundaries([0]), UBShapeError, ["cu_seqlens starts [0]", "one boundary more"]),
        (boundaries([0, 4, 3]), UBShapeError, ["cu_seqlens[2] = 3", "must not decrease", "is 4"]),
        (boundaries([0, 4], [0, 4, 8]), UBShapeError, ["1 real and 2 padded lengths"]),
        (boundaries([0, 5], [0, 4]), UBShapeError, ["sequence 0 has 5 tokens in 4 rows", "at most"]),
        (
            boundaries([0, 4, 10], cp=2),
            UBAlignmentError,
            ["sequence 1 takes 6 rows", "2*cp = 4", "next valid value is 8"],
        ),
        (boundaries([0, 8], total_tokens=4), UBShapeError, ["total_tokens = 4", "the last boundary, 8"]),
        (
            boundaries([0, 8], total_tokens=10, tp=4),
            UBAlignmentError,
            ["T = 10", "multiple of 4", "next valid T is 12"],
        ),
        (boundaries([0, 8], total_tokens=12, tail="error"), UBAlignmentError, ["T = 8", "the next one is 12"]),
        (
            lambda: PackedBatch((4,), (4,), documents=2, max_seqlen=4),
            UBShapeError,
            ["documents = 2", "1 .. 1"],
        ),
        (
            lambda: PackedBatch((4, 6), (4, 6), documents=2, max_seqlen=6, tp=4),
            UBAlignmentError,
            ["T = 10", "next valid T is 12"],
        ),
    ],
)
def test_errors_name_the_value_the_rule_and_the_next_valid_value(
    call: Callable[[], PackedBatch], error: Any, texts: list[str]
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    for text in texts:
        assert text in str(caught.value)


def test_device_tensors_are_refused() -> None:
    on_device = torch.zeros(3, dtype=torch.int32, device="meta")
    for call in (make(on_device), boundaries(on_device), boundaries([0, 4], on_device)):
        with pytest.raises(UBUnsupportedError, match=r"tensor on meta: reading it would wait .*allow_sync=True"):
            call()

# SPDX-License-Identifier: Apache-2.0
"""Chunk layouts against a model that marks every element of the buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ub_dynamic.errors import UBAlignmentError, UBCapacityError, UBShapeError
from ub_dynamic.shapes import Collective, Method, chunk_layout, parse_shape, registered_rows

KINDS: list[tuple[Method, Collective]] = [
    ("bulk", "ag"),
    ("bulk", "rs"),
    ("pipeline", "rs"),
    ("ring_exchange", "ag"),
    ("ring_exchange", "rs"),
]
DTYPES = [torch.bfloat16, torch.float32, torch.uint8]


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[Method, Collective, int, int, int, int, int, torch.dtype]:
    method, collective = draw(st.sampled_from(KINDS))
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    splits = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 6))
    capacity_rows = draw(st.integers(rows, 8))
    hidden = draw(st.integers(1, 9)) * (splits if method == "pipeline" else 1)
    return method, collective, tp, rows * tp, capacity_rows * tp, hidden, splits, draw(st.sampled_from(DTYPES))


@settings(max_examples=3200, deadline=None)
@given(small_cases())
def test_chunks_tile_the_active_prefix_and_never_pass_capacity(
    case: tuple[Method, Collective, int, int, int, int, int, torch.dtype],
) -> None:
    method, collective, tp, tokens, capacity, hidden, splits, dtype = case
    layout = chunk_layout(method, collective, (capacity, hidden), (tokens, hidden), tp, dtype, splits)
    registered = np.zeros(registered_rows(method, collective, capacity, tp) * hidden, dtype=int)
    for chunk in layout.chunks:
        assert chunk.numel == chunk.rows * chunk.columns
        assert (chunk.offset_bytes, chunk.nbytes) == (chunk.offset * dtype.itemsize, chunk.numel * dtype.itemsize)
        registered[chunk.offset : chunk.offset + chunk.numel] += 1
    used = layout.view_shape[0] * layout.view_shape[1]
    assert (registered[:used] == 1).all(), "a hole or an overlap in the active prefix"
    assert (registered[used:] == 0).all(), "a chunk past the active prefix"
    assert layout.nbytes == used * dtype.itemsize <= layout.capacity_nbytes == registered.size * dtype.itemsize


@settings(max_examples=800, deadline=None)
@given(small_cases())
def test_what_each_method_means(case: tuple[Method, Collective, int, int, int, int, int, torch.dtype]) -> None:
    method, collective, tp, tokens, capacity, hidden, splits, dtype = case
    layout = chunk_layout(method, collective, (capacity, hidden), (tokens, hidden), tp, dtype, splits)
    local = tokens // tp * hidden
    assert layout.local_numel == local and layout.wire_numel == local * (tp - 1)
    if method == "pipeline":
        assert [chunk.offset for chunk in layout.chunks] == [i * tokens * hidden // splits for i in range(splits)]
        assert {(chunk.rows, chunk.columns) for chunk in layout.chunks} == {(tokens, hidden // splits)}
    else:
        assert [chunk.offset for chunk in layout.chunks] == [i * local for i in range(len(layout.chunks))]
    if (method, collective) == ("ring_exchange", "rs"):
        assert len(layout.chunks) == 2 * tp - 1
        assert layout.receive_slots == tuple(range(tp, 2 * tp - 1))
        assert layout.reduce_slots == (tp - 1, *layout.receive_slots)
    else:
        assert layout.receive_slots == layout.reduce_slots == ()
        assert layout.view_shape == (tokens, hidden)


def test_a_layout_does_not_depend_on_capacity() -> None:
    small, large = (chunk_layout("ring_exchange", "rs", (rows, 32), (64, 32), 4, torch.bfloat16) for rows in (64, 4096))
    assert small.chunks == large.chunks and small.view_shape == large.view_shape


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("bulk", "ag", (64, 8), (64, 9), 2), UBShapeError, ["hidden size is fixed at init", "H = 8"]),
        (("bulk", "ag", (64, 8), (66, 8), 2), UBCapacityError, ["66", "64"]),
        (("bulk", "ag", (64, 8), (7, 8), 4), UBAlignmentError, ["T = 7", "tp = 4", "8"]),
        (("bulk", "ag", (62, 8), (8, 8), 4), UBAlignmentError, ["capacity = 62", "64"]),
        (("bulk", "ag", (64, 8), (0, 8), 4), UBShapeError, ["positive"]),
        (("pipeline", "ag", (64, 8), (8, 8), 4), UBShapeError, ["reduce-scatter only"]),
        (("pipeline", "rs", (64, 9), (8, 9), 4), UBAlignmentError, ["H = 9", "num_splits = 4"]),
        (("tree", "rs", (64, 8), (8, 8), 4), UBShapeError, ["tree", "ring_exchange"]),
        (("bulk", "ag", (64, 8), (8, 8), 0), UBShapeError, ["tp is 0"]),
    ],
)
def test_bad_layouts(arguments: tuple, error: type[UBShapeError], words: list[str]) -> None:  # type: ignore[type-arg]
    with pytest.raises(error) as raised:
        chunk_layout(*arguments, torch.bfloat16)
    assert type(raised.value) is error
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    "shape", [[64, 8], (64, 8), torch.Size([64, 8]), [torch.tensor(64), 8], [np.int64(64), np.int32(8)]]
)
def test_parse_shape_takes_what_is_an_int(shape: object) -> None:
    parsed = parse_shape(shape)
    assert parsed == (64, 8) and [type(value) for value in parsed] == [int, int]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([64], ["2-D [tokens, hidden]", "[64]"]),
        ([1, 64, 8], ["2-D [tokens, hidden]", "3 entries"]),
        (64, ["2-D [tokens, hidden]", "64 (int)"]),
        ("64", ["2-D [tokens, hidden]", "'64'"]),
        (None, ["2-D [tokens, hidden]", "None"]),
        ([64.0, 8], ["2-D [tokens, hidden]", "64.0 (float)"]),
        ([True, 8], ["2-D [tokens, hidden]", "True (bool)"]),
        ([torch.tensor(64.0), 8], ["2-D [tokens, hidden]", "float32"]),
        ([torch.tensor([64]), 8], ["2-D [tokens, hidden]", "shape (1,)"]),
        ([torch.zeros((), dtype=torch.int64, device="meta"), 8], ["2-D [tokens, hidden]", "synchronise"]),
        ([-2, 8], ["[-2, 8]: tokens must be positive", "skip the microbatch on all TP ranks"]),
        ([64, 0], ["[64, 0]: hidden must be positive"]),
        ([0, 8], ["[0, 8]: tokens must be positive", "skip the microbatch on all TP ranks"]),
    ],
)
def test_parse_shape_refuses(shape: object, words: list[str]) -> None:
    with pytest.raises(UBShapeError) as raised:
        parse_shape(shape)
    assert all(word in str(raised.value) for word in words), str(raised.value)

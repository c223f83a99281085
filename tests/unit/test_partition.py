# SPDX-License-Identifier: Apache-2.0
"""Partitions against a model that hands out single tokens, TE's documented examples, and every refusal."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ub_dynamic.cp.partition import Half, Partition
from ub_dynamic.cp.rope import rope_kwargs, table_rows
from ub_dynamic.errors import UBAlignmentError, UBShapeError, UBUnsupportedError
from ub_dynamic.packing import PackedBatch

ZIGZAG, CONTIGUOUS = Partition.zigzag(), Partition.contiguous()
HALVES: list[tuple[Half, slice]] = [("both", slice(0, 2)), ("first", slice(0, 1)), ("second", slice(1, 2))]


def batches(most: int = 40) -> st.SearchStrategy[PackedBatch]:
    return st.builds(
        PackedBatch.from_lengths,
        st.lists(st.integers(0, most), min_size=1, max_size=4).filter(any),
        cp=st.sampled_from([1, 2, 3, 4, 8]),
        align=st.sampled_from([1, 4]),
        tail=st.sampled_from(["ghost", "extend_last"]),
    )


def owner(name: str, position: int, rows: int, cp: int) -> int:
    """The rank that holds a position of a sequence of ``rows`` rows."""
    if name == "contiguous" or cp == 1:
        return position * cp // rows
    chunk = position * 2 * cp // rows
    return chunk if chunk < cp else 2 * cp - 1 - chunk


def model(batch: PackedBatch, owners: Callable[[int, int, int], int]) -> list[list[tuple[int, int, int]]]:
    """For every rank its tokens (packed row, sequence, position), handed out one by one in packed order."""
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(batch.cp)]
    row = 0
    for sequence, rows in enumerate(batch.padded):
        for position in range(rows):
            ranks[owners(sequence, position, rows)].append((row, sequence, position))
            row += 1
    return ranks


def check_against(batch: PackedBatch, partition: Partition, ranks: list[list[tuple[int, int, int]]], rank: int) -> None:
    """Every fact about one rank, and the way back from all of them."""
    tokens = ranks[rank]
    indices = partition.indices(batch, rank)
    assert indices.dtype == torch.int64 and indices.tolist() == [row for row, _, _ in tokens]
    assert len(indices) == batch.local_tokens
    assert partition.offsets(batch, rank).tolist() == [position for _, _, position in tokens]
    real = [position < batch.seqlens[sequence] for _, sequence, position in tokens]
    assert partition.real_rows(batch, rank).tolist() == real

    counts, rows, seen = [], [], 0
    for padded in batch.padded:
        size = padded // batch.cp
        mine, middle = real[seen : seen + size], size // 2
        counts.append((sum(mine[:middle]), sum(mine[middle:])))
        rows.append((middle, size - middle))
        seen += size
    assert [sequence for _, sequence, _ in tokens] == [i for i, pair in enumerate(rows) for _ in range(sum(pair))]
    assert partition.real_counts(batch, rank) == tuple(counts)
    for half, take in HALVES:
        for got, pairs in (
            (partition.cu_seqlens(batch, rank, half), counts),
            (partition.cu_seqlens_padded(batch, half), rows),
        ):
            assert got == tuple(sum(sum(pair[take]) for pair in pairs[:i]) for i in range(len(pairs) + 1))

    packed = torch.arange(batch.total_tokens) * 7 + 3
    gathered = packed[torch.tensor([row for tokens in ranks for row, _, _ in tokens])]
    assert torch.equal(gathered[partition.inverse(batch)], packed)


@settings(max_examples=3000, deadline=None)
@given(batches(), st.sampled_from([ZIGZAG, CONTIGUOUS]), st.integers(0, 7))
def test_chunks_against_the_model(batch: PackedBatch, partition: Partition, rank: int) -> None:
    ranks = model(batch, lambda _, position, rows: owner(partition.name, position, rows, batch.cp))
    check_against(batch, partition, ranks, rank % batch.cp)
    assert partition.positions(batch, rank % batch.cp).tolist() == [at for _, _, at in ranks[rank % batch.cp]]


@settings(max_examples=1000, deadline=None)
@given(batches(most=16), st.integers(0, 2**32), st.integers(0, 7))
def test_custom_against_the_model(batch: PackedBatch, seed: int, rank: int) -> None:
    shuffle = random.Random(seed).shuffle
    holders = []
    for rows in batch.padded:
        ranks_of = [rank for rank in range(batch.cp) for _ in range(rows // batch.cp)]
        shuffle(ranks_of)
        holders.append(ranks_of)
    ranks = model(batch, lambda sequence, position, _: holders[sequence][position])
    custom = Partition.custom([[row for row, _, _ in tokens] for tokens in ranks])
    check_against(batch, custom, ranks, rank % batch.cp)


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_grid_against_the_model(data: st.DataObject) -> None:
    down, across = data.draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4), (4, 2), (1, 1)]))
    cp = down * across
    frames = []
    for _ in range(data.draw(st.integers(1, 3))):
        tall, wide = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        wide *= 1 if tall * wide % 2 == 0 else 2  # every rank's block has an even number of tokens
        frames.append((data.draw(st.integers(0, 2)), tall * down, wide * across))
    frames[0] = (1, *frames[0][1:])
    batch = PackedBatch.from_lengths([n * h * w for n, h, w in frames], cp=cp, align=data.draw(st.sampled_from([1, 3])))
    partition = Partition.grid2d([h for _, h, _ in frames], [w for _, _, w in frames], ranks=(down, across))

    def holder(sequence: int, position: int, rows: int) -> int:
        if sequence >= len(frames):
            return position * cp // rows
        _, height, width = frames[sequence]
        row, column = position % (height * width) // width, position % width
        return row * down // height * across + column * across // width

    ranks, rank = model(batch, holder), data.draw(st.integers(0, cp - 1))
    check_against(batch, partition, ranks, rank)
    expected = []
    for _, sequence, position in ranks[rank]:
        _, height, width = frames[sequence] if sequence < len(frames) else (0, 1, 1)
        inside = position % (height * width) if sequence < len(frames) else 0
        expected.append([inside // width, inside % width])
    assert partition.positions(batch, rank).tolist() == expected


def test_documented_zigzags() -> None:
    two = PackedBatch.from_lengths([8, 8], cp=2)
    assert ZIGZAG.indices(two, 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert ZIGZAG.indices(two, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    five = PackedBatch.from_lengths([8] * 5, cp=4)
    assert ZIGZAG.indices(five, 0).tolist() == [0, 7, 8, 15, 16, 23, 24, 31, 32, 39]
    assert ZIGZAG.indices(five, 3).tolist() == [3, 4, 11, 12, 19, 20, 27, 28, 35, 36]
    assert torch.equal(ZIGZAG.rank_major(five), torch.cat([ZIGZAG.indices(five, rank) for rank in range(4)]))
    padded = PackedBatch.from_cu_seqlens([0, 3, 7], [0, 4, 12], cp=2, tail="error")
    real = torch.cat([ZIGZAG.real_rows(padded, rank) for rank in range(2)])[ZIGZAG.inverse(padded)]
    assert real.tolist() == [position not in (3, 8, 9, 10, 11) for position in range(12)]


def test_the_last_padded_sequence_is_what_division_gets_wrong() -> None:
    batch = PackedBatch.from_lengths([698], cp=4)
    counts = [ZIGZAG.real_counts(batch, rank)[0] for rank in range(4)]
    assert counts == [(88, 82), (88, 88), (88, 88), (88, 88)]
    assert batch.pad_between_seqs and 698 // 4 not in {first + second for first, second in counts}
    equal = PackedBatch.from_lengths([704], cp=4)
    assert not equal.pad_between_seqs
    assert {ZIGZAG.cu_seqlens(equal, rank) for rank in range(4)} == {(0, 704 // 4)}


def test_the_default_grid_of_ranks_has_square_blocks() -> None:
    batch = PackedBatch.from_lengths([8 * 8, 16 * 2, 2 * 16], cp=4)
    partition = Partition.grid2d([8, 16, 2], [8, 2, 16])
    assert partition.positions(batch, 3).tolist() == (
        [[row, column] for row in range(4, 8) for column in range(4, 8)]
        + [[row, column] for row in range(12, 16) for column in range(2)]
        + [[row, column] for row in range(2) for column in range(12, 16)]
    )
    assert Partition.grid2d(8, 8).indices(PackedBatch.from_lengths([128], cp=4), 1)[:5].tolist() == [4, 5, 6, 7, 12]


def test_partitions_are_values() -> None:
    assert Partition.zigzag() == ZIGZAG != CONTIGUOUS and hash(Partition.zigzag()) == hash(ZIGZAG)
    grid = Partition.grid2d(4, [8, 2])
    assert pickle.loads(pickle.dumps(grid)) == grid == Partition.grid2d([4, 4], (8, 2))
    custom = Partition.custom(torch.tensor([[0, 3], [1, 2]], dtype=torch.int32))
    batch = PackedBatch.from_lengths([4], cp=2)
    copied = pickle.loads(pickle.dumps(custom))
    assert copied.indices(batch, 1).tolist() == custom.indices(batch, 1).tolist() == [1, 2]
    custom.indices(batch, 1).zero_()
    assert custom.indices(batch, 1).tolist() == [1, 2], "what is handed out is the caller's own"


@pytest.mark.parametrize(
    ("partition", "exact"),
    [
        (ZIGZAG, {"padding", "padding_causal"}),
        (CONTIGUOUS, {"padding"}),
        (Partition.grid2d(4, 4), {"padding"}),
        (Partition.custom([[0, 1], [2, 3]]), {"padding"}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_masks(partition: Partition, exact: set[str]) -> None:
    plain, padded = PackedBatch.from_lengths([16], cp=2), PackedBatch.from_lengths([15], cp=2)
    for mask, name in (
        ("padding", "padding"),
        ("no_mask", "padding"),
        ("padding_causal", "padding_causal"),
        ("causal", "padding_causal"),
    ):
        if name in exact:
            assert partition.check(mask) == partition.check(mask, plain, "te") == partition.check(mask, padded) == name
        else:
            with pytest.raises(UBUnsupportedError, match=f"{mask}.*{partition.name}.*holds for 'zigzag' only"):
                partition.check(mask)
    for mask in ("padding_causal_bottom_right", "arbitrary", "window"):
        with pytest.raises(UBUnsupportedError, match=f"{mask}.*only 'padding' and 'padding_causal' are exact"):
            partition.check(mask)
    if partition.name == "zigzag":
        assert partition.check("padding", padded, "te") == "padding"
    else:
        with pytest.raises(UBUnsupportedError, match=r"get_cu_seqlens_on_cp_rank.*2\*cp = 4"):
            partition.check("padding", padded, "te")


def use(partition: Callable[[], Partition], lengths: list[int], rank: int = 0, **sizes: Any) -> Callable[[], Any]:
    return lambda: partition().indices(PackedBatch.from_lengths(lengths, **{"cp": 2, **sizes}), rank)


@pytest.mark.parametrize(
    ("call", "error", "texts"),
    [
        (use(Partition.zigzag, [8], rank=2), UBShapeError, ["rank 2", "cp = 2 has ranks 0 .. 1"]),
        (use(Partition.contiguous, [8], rank=-1), UBShapeError, ["rank -1"]),
        (use(lambda: Partition.grid2d(4, 4), [8], rank=2), UBShapeError, ["rank 2"]),
        (use(lambda: Partition.custom([[0, 1], [2, 3]]), [4], rank=2), UBShapeError, ["rank 2"]),
        (lambda: Partition.custom([[0, 1], [2]]), UBShapeError, ["[2, 1] rows", "as many"]),
        (lambda: Partition.custom(torch.ones(2, 2)), UBShapeError, ["must be ints", "float32"]),
        (lambda: Partition.custom(torch.ones(4, dtype=torch.int64)), UBShapeError, ["[cp, T/cp]", "(4,)"]),
        (lambda: Partition.custom([[0, 1], [3, 4]]), UBShapeError, ["0 .. 3 exactly once", "row 2 is missing"]),
        (lambda: Partition.custom([[0, 1], [1, 3]]), UBShapeError, ["exactly once", "another 1"]),
        (
            use(lambda: Partition.custom([[0, 1], [2, 3]]), [8]),
            UBShapeError,
            ["[cp, T/cp] = [2, 2], the batch has [2, 4]"],
        ),
        (
            # Half of the whole buffer for each rank: one rank would hold all of the first sequence.
            use(lambda: Partition.custom([list(range(6)), list(range(6, 12))]), [4, 8]),
            UBUnsupportedError,
            ["rank 0: local row 2 is packed row 2 of sequence 0, expected one of sequence 1", "mix or miss keys"],
        ),
        (lambda: Partition.grid2d([4, 4], [4, 4, 4]), UBShapeError, ["2 heights and 3 widths"]),
        (lambda: Partition.grid2d(0, 4), UBShapeError, ["at least 1"]),
        (lambda: Partition.grid2d(4, 4, ranks=(0, 2)), UBShapeError, ["ranks=(0, 2)", "at least 1"]),
        (use(lambda: Partition.grid2d([4, 4], 4), [16, 16, 16]), UBShapeError, ["2 frame sizes", "3 documents"]),
        (use(lambda: Partition.grid2d(4, 4), [24]), UBShapeError, ["24 tokens", "4 x 4 = 16"]),
        (use(lambda: Partition.grid2d(3, 6), [18]), UBUnsupportedError, ["18 tokens in 20 rows", "2*cp = 4"]),
        (
            use(lambda: Partition.grid2d(4, 4), [16], align=16, tail="extend_last"),
            UBUnsupportedError,
            ["16 tokens in 32 rows", "tail='ghost'"],
        ),
        (
            use(lambda: Partition.grid2d(4, 4, ranks=(3, 1)), [16]),
            UBShapeError,
            ["3 x 1 ranks", "product must be cp = 2"],
        ),
        (
            use(lambda: Partition.grid2d(4, 5, ranks=(1, 2)), [20]),
            UBAlignmentError,
            ["no frame of 4 x 5", "1 x 2 ranks"],
        ),
        (
            use(lambda: Partition.grid2d(5, 5), [100]),
            UBAlignmentError,
            ["no frame of 5 x 5 can be cut over 1 x 2 or 2 x 1 ranks"],
        ),
        (
            lambda: ZIGZAG.cu_seqlens(PackedBatch.from_lengths([8], cp=2), 0, "third"),  # type: ignore[arg-type]
            UBShapeError,
            ["half = 'third'", "'both', 'first' or 'second'"],
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], texts: list[str]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    for text in texts:
        assert text in str(caught.value)


def fused_positions(kwargs: dict[str, Any]) -> list[int]:
    """The position that TE's fused rotary kernel gives to each local row (fused_rope.cu)."""
    cp, rank = kwargs.get("cp_size", 1), kwargs.get("cp_rank", 0)
    bounds = [bound // cp for bound in kwargs["cu_seqlens"].tolist()]
    starts = kwargs["start_positions"].tolist() if "start_positions" in kwargs else [0] * (len(bounds) - 1)
    positions = []
    for begin, end, start in zip(bounds, bounds[1:], starts, strict=False):
        length = end - begin
        for row in range(length):
            shift = 0
            if cp > 1:
                half = length // 2
                shift = rank * half if row < half else length * cp - (rank + 1) * half - half
            positions.append(start + row + shift)
    return positions


@pytest.mark.parametrize("partition", [ZIGZAG, CONTIGUOUS], ids=lambda each: each.name)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_rope_kwargs_say_the_positions(partition: Partition, cp: int) -> None:
    batch = PackedBatch.from_lengths([5, 0, 32, 17], cp=cp, align=8)
    for rank in range(cp):
        kwargs = rope_kwargs(batch, partition, rank, "cpu")
        assert kwargs["tensor_format"] == "thd" and kwargs["fused"] and kwargs["cu_seqlens"].dtype == torch.int32
        assert fused_positions(kwargs) == partition.positions(batch, rank).tolist()
        assert rope_kwargs(batch, partition, rank, "cpu")["cu_seqlens"] is kwargs["cu_seqlens"]
    with pytest.raises(UBShapeError, match=f"rank {cp}"):
        rope_kwargs(batch, partition, cp, "cpu")


@pytest.mark.te
@pytest.mark.parametrize("partition", [ZIGZAG, CONTIGUOUS], ids=lambda each: each.name)
def test_rope_kwargs_against_te(partition: Partition) -> None:
    rope = pytest.importorskip("transformer_engine.pytorch.attention.rope")
    batch = PackedBatch.from_lengths([5, 32, 17], cp=2, align=8)
    freqs = torch.rand(batch.max_seqlen, 1, 1, 8)
    for rank in range(2):
        kwargs = rope_kwargs(batch, partition, rank, "cpu")
        x = torch.rand(batch.local_tokens, 3, 8)
        got = rope.apply_rotary_pos_emb(x, freqs, **{**kwargs, "fused": False})
        angles = table_rows(batch, partition, rank, freqs.view(-1, 8)).unsqueeze(1)
        turned = torch.cat([-x[..., 4:], x[..., :4]], dim=-1)
        torch.testing.assert_close(got, x * angles.cos() + turned * angles.sin())


def test_table_rows() -> None:
    batch = PackedBatch.from_lengths([16, 32], cp=4, align=20)
    rows, columns = torch.rand(4, 3), torch.rand(4, 5)
    grid = Partition.grid2d(4, 4)
    got = table_rows(batch, grid, 1, rows, columns)
    at = grid.positions(batch, 1)
    assert torch.equal(got, torch.cat([rows[at[:, 0]], columns[at[:, 1]]], dim=1))
    table = torch.rand(batch.max_seqlen, 6)
    assert torch.equal(table_rows(batch, ZIGZAG, 2, table), table[ZIGZAG.positions(batch, 2)])
    with pytest.raises(UBUnsupportedError, match=r"'grid2d' has 2-D positions, got 1 table"):
        table_rows(batch, grid, 1, rows)
    with pytest.raises(UBUnsupportedError, match=r"partition 'grid2d' needs table_rows"):
        rope_kwargs(batch, grid, 1, "cpu")

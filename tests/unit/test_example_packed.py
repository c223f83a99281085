# SPDX-License-Identifier: Apache-2.0
"""The parts of examples/train_packed.py that need no ranks: documents, packed rows, attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from packed import data
from packed.settings import UsageError, check_ranks, make_folders, parse

from ub_dynamic.packing import PackedBatch
from ub_dynamic.planning import plan_fixed_count
from ub_dynamic.ranks import Launch

SOURCE = b"""import sys

@decorated
@twice
def first():
    def inner(): pass

class Second:
    def method(self): pass

async def third(): pass
"""


def test_a_long_file_becomes_its_top_level_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MIN_DOCUMENT", 1)
    assert data.split_source(SOURCE, len(SOURCE)) == [SOURCE]
    pieces = data.split_source(SOURCE, len(SOURCE) - 1)
    assert b"".join(pieces) == SOURCE
    assert [piece.split()[0] for piece in pieces] == [b"import", b"@decorated", b"class", b"async"]
    assert [len(piece) for piece in data.split_source(SOURCE, 20)] == [12, 20, 20, 20]


def test_short_pieces_are_left_out() -> None:
    assert data.split_source(b"x = 1\n", 100) == []
    assert all(len(piece) >= data.MIN_DOCUMENT for piece in data.split_source(SOURCE, 60))


def test_documents_of_the_standard_library_differ_in_length() -> None:
    documents = data.read_documents(2048)
    assert documents == data.read_documents(2048)
    lengths = sorted(map(len, documents))
    assert len(documents) > 2000
    assert lengths[-1] == 2048 > 2 * lengths[len(lengths) // 2]
    assert data.draw(documents, 50, seed=3) == data.draw(documents, 50, seed=3) != data.draw(documents, 50, seed=4)


def test_rows_of_a_microbatch() -> None:
    documents = [b"abc", b"de"]
    packed = data.pack(documents, plan_fixed_count([3, 2], 2, tp=4))[0]
    rows = data.lay_out(packed)
    begin, ignored = data.BEGIN, data.IGNORED
    assert rows.tokens.tolist() == [begin, *b"ab", begin, *b"d", begin, begin, begin]
    assert rows.targets.tolist() == [*b"abc", *b"de", ignored, ignored, ignored]
    assert rows.positions.tolist()[:5] == [0, 1, 2, 0, 1]
    padded = data.lay_out(packed.padded_to(16))
    assert padded.batch.total_tokens == 16
    assert padded.targets.tolist() == [*b"abcde", *[ignored] * 11]


def test_attention_stays_within_a_document() -> None:
    pytest.importorskip("numpy")
    from packed.model import attention

    batch = PackedBatch.from_lengths([5, 1, 7], tp=8, capacity=16, bucket=16)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    document = torch.tensor([0] * 5 + [1] + [2] * 7)
    mask = (document[:, None] == document) & torch.ones(13, 13, dtype=torch.bool).tril()
    heads_first = (x[:13].transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(0, 1)
    rows = data.Rows(batch, *(torch.zeros(16, dtype=torch.int64) for _ in range(3)))
    result = attention(q, k, v, rows)
    torch.testing.assert_close(result[:13], expected)
    assert not result[13:].any()


def test_rotary_embedding_depends_on_distance_only() -> None:
    pytest.importorskip("numpy")
    from packed.model import rope, rotate

    x = torch.ones(1, 1, 8).expand(12, 1, 8)
    turned = rotate(x, rope(torch.arange(12), 8)).squeeze(1)
    scores = turned @ turned.T
    for distance in range(12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[0, 0], scores[0, 5])


def test_plans_put_every_document_into_one_microbatch() -> None:
    pytest.importorskip("numpy")
    from packed.job import prepare

    flags = ["--steps", "4", "--accumulate", "3", "--documents", "5", "--max-document", "600"]
    fixed = prepare(parse(flags), tp=2)
    budget = prepare(parse([*flags, "--plan", "packed", "--max-tokens", "2000"]), tp=2)
    drawn = data.draw(data.read_documents(600), 60, seed=0)
    for work in (fixed, budget):
        microbatches = [packed for step in work.steps for packed in step]
        assert sorted(document for packed in microbatches for document in packed.documents) == sorted(drawn)
        tokens = [packed.batch.total_tokens for packed in microbatches]
        assert work.capacity == max(tokens) == work.largest.batch.total_tokens
        assert not any(count % 2 for count in tokens)
    assert {len(packed.documents) for step in fixed.steps for packed in step} == {5}
    assert len(fixed.steps) == 4
    assert budget.capacity <= 2000
    with pytest.raises(UsageError, match=r"1000000 documents, but the standard library has \d+ with"):
        prepare(parse(["--steps", "125000"]), tp=2)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--hidden", "100"],
            "reduce-scatter and of 2 * --heads for rotary embedding; the next valid value is 128",
        ),
        (["--hidden", "96", "--heads", "5"], "--hidden 96 must be a multiple of 160"),
        (["--mode", "dynamic", "--compare"], "--compare runs every mode, --mode only one"),
        (["--mode", "dynamic", "--result"], "--result needs dynamic and pad in one job"),
        (["--mode", "fast"], "invalid choice: 'fast'"),
        (["--steps", "0"], "'0' is not a positive whole number"),
        (["--lr", "0"], "--lr 0.0 must be positive"),
        (["--stepz", "3"], "unrecognized arguments: --stepz 3"),
    ],
)
def test_wrong_settings(flags: list[str], text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(flags)
    assert text in str(error.value)


def test_settings_that_do_not_fit_the_ranks_or_the_disk(tmp_path: Path) -> None:
    launch = Launch(rank=0, world_size=3, local_rank=0, launcher="torchrun")
    with pytest.raises(UsageError, match="--heads 4 cannot be divided among 3 ranks; the next valid value is 6"):
        check_ranks(parse([]), launch)
    with pytest.raises(UsageError, match="--result describes a job over MPI"):
        check_ranks(parse(["--result", "--heads", "6", "--hidden", "96"]), launch)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make the folder .*file: File exists"):
        make_folders(parse(["--out", str(tmp_path / "file")]))

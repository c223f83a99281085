# SPDX-License-Identifier: Apache-2.0
"""Routes against a brute-force relay, and the small parts: store, receive buffers, headers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ub_dynamic.errors import (
    UBCapacityError,
    UBRankMismatchError,
    UBShapeError,
    UBStateError,
    UBTimeoutError,
    UBUnsupportedError,
)
from ub_dynamic.pipeline import (
    BlockRoutes,
    BlockStore,
    PipelineRunner,
    PipelineTransport,
    make_schedule,
    store_peak,
)
from ub_dynamic.pipeline import (
    stage as stage_module,
)
from ub_dynamic.pipeline.buffers import BufferPool
from ub_dynamic.pipeline.headers import MAGIC, Header, check, check_dtype, pack_abort, peer_failure, unpack

cuts = st.integers(1, 5).flatmap(
    lambda pp: st.tuples(st.just(pp), st.lists(st.integers(0, 3), min_size=1, max_size=5 * pp).map(tuple))
)


def relay(pp: int, counts: tuple[int, ...], cache: bool):
    """Send block by block along the stages, with one set a rank of what it has seen: (blocks sent, held at entry)."""
    seen: list[set[int]] = [set() for _ in range(pp)]
    known: set[int] = set()
    sent, held = [], []
    for stage in range(len(counts)):
        rank = stage % pp
        held.append(set(seen[rank]) if cache else set())
        known |= set(range(len(known), len(known) + counts[stage]))
        seen[rank] |= known
        if stage + 1 < len(counts):
            following = (stage + 1) % pp
            sent.append(known - seen[following] if cache else set(known))
    return [*sent, set()], held


@given(cuts)
def test_routes_are_those_of_a_relay(cut: tuple[int, tuple[int, ...]]) -> None:
    pp, counts = cut
    counts = counts[: len(counts) // pp * pp] or (1,) * pp
    for cache in (False, True):
        routes = BlockRoutes(pp, counts, cache)
        sent, held = relay(pp, counts, cache)
        assert [set(blocks) for blocks in routes.send] == sent
        assert [set(blocks) for blocks in routes.held_at_entry] == held
        assert routes.blocks_sent() == routes.closed_form()
        edges = Counter((block, stage % pp) for stage, blocks in enumerate(routes.send) for block in blocks)
        if cache and pp > 1:
            assert not edges or max(edges.values()) == 1  # no block crosses an edge of the ring twice
        for stage in range(len(counts)):
            for block in (*routes.received(stage), *routes.commits[stage]):
                later = range(stage + pp, len(counts), pp)
                assert routes.deposits_expected(block, stage) == sum(block in held[s] for s in later)


@pytest.mark.parametrize(
    ("pp", "vpp", "stages", "plain", "cached"),
    [
        (2, 2, [0, 1], 5, 2),
        (4, 4, [0, 3, 7, 11], 39, 12),
        (4, 2, [0, 2, 4, 6], 16, 10),
        (4, 2, range(8), 28, 18),
        (8, 4, range(32), 496, 196),
        (8, 4, range(0, 32, 4), 136, 52),
        (4, 1, range(4), 6, 6),
        (1, 4, range(4), 0, 0),
    ],
)
def test_known_volumes(pp: int, vpp: int, stages, plain: int, cached: int) -> None:
    counts = tuple(list(stages).count(stage) for stage in range(pp * vpp))
    assert BlockRoutes(pp, counts, cache=False).blocks_sent() == plain
    assert BlockRoutes(pp, counts, cache=True).blocks_sent() == cached


def test_routes_from_layers() -> None:
    routes = BlockRoutes.from_layers([[0, 1], [2, 3, 4], [], [5, 6]], 3, 2)
    assert routes.counts == (1, 1, 0, 1)
    assert routes.commits == ((0,), (1,), (), (2,))
    assert routes.stage_of(2) == 3


@pytest.mark.parametrize(
    ("pp", "counts", "says"),
    [(2, (1, 1, 1), "3 stages on pp = 2"), (0, (1,), "pp = 0"), (1, (), "0 stages"), (2, (1, -1), "fewer than 0")],
)
def test_routes_that_cannot_be(pp: int, counts: tuple[int, ...], says: str) -> None:
    with pytest.raises(UBShapeError, match=says):
        BlockRoutes(pp, counts)


def test_foretold_peak_of_a_case_by_hand() -> None:
    """pp 1, two chunks that commit a block each: when the second microbatch keeps its block for chunk 1, the gradient
    that the first one's chunk 1 has left is still there."""
    plan = list(make_schedule("interleaved", 0, 1, 2, 2))
    assert [(a.kind[0], a.chunk, a.microbatch) for a in plan[:4]] == [
        ("f", 0, 0),
        ("f", 1, 0),
        ("b", 1, 0),
        ("f", 0, 1),
    ]
    assert store_peak(BlockRoutes(1, (1, 1)), 0, plan, [5, 9], 8) == (5 + 9) * 8


# -- store -------------------------------------------------------------------------------------------------------


def test_store_counts_and_sums() -> None:
    store, value = BlockStore(), torch.ones(3, 4, requires_grad=True)
    store.put(0, 1, value)
    kept = store.kept(0)[1].tensor
    assert kept.data_ptr() == value.data_ptr()  # no copy
    assert not kept.requires_grad
    first = torch.full((3, 4), 2.0)
    store.deposit(0, 1, first)
    store.deposit(0, 1, torch.full((3, 4), 3.0))
    assert store.live_bytes == 2 * 3 * 4 * 4
    assert torch.equal(first, torch.full((3, 4), 2.0))  # what was left is not changed
    total = store.collect(0, 1, expected=2)
    assert total is not None
    assert torch.equal(total, torch.full((3, 4), 5.0))
    store.release(0)
    store.check_finished(0)
    assert store.empty
    assert store.live_bytes == 0
    assert store.peak_bytes == 96


def test_store_says_what_is_wrong() -> None:
    store = BlockStore()
    store.put(0, 1, torch.ones(2))
    with pytest.raises(UBStateError, match="block 1 of microbatch 0 is kept already"):
        store.put(0, 1, torch.ones(2))
    with pytest.raises(
        UBStateError, match="block 1 of microbatch 0 has 0 gradients from later chunks, the routes say 1"
    ):
        store.collect(0, 1, expected=1)
    store.deposit(0, 7, torch.ones(2))
    with pytest.raises(UBStateError, match=r"still holds the values of blocks \[1\] and the gradients of blocks \[7\]"):
        store.check_finished(0)
    store.clear()
    assert store.empty
    assert store.live_bytes == 0


# -- receive buffers ---------------------------------------------------------------------------------------------


def test_buffers_come_back_with_the_last_share() -> None:
    pool = BufferPool(8, 4, torch.float32, torch.device("cpu"), poison=True)
    first, second = pool.lease(3), pool.lease(8)
    assert (first.tensor.shape, second.tensor.shape) == ((3, 4), (8, 4))
    first.tensor.fill_(1.0)
    first.share()
    first.release()
    assert pool.leased == 2
    assert torch.equal(first.tensor, torch.ones(3, 4))
    first.release()
    assert pool.leased == 1
    assert first.tensor.isnan().all()  # poisoned: a reader that came too late would see it
    third = pool.lease(5)
    assert third.tensor.data_ptr() == first.tensor.data_ptr()
    assert (pool.made, pool.nbytes) == (2, 2 * 8 * 4 * 4)
    with pytest.raises(UBStateError, match="after its last holder gave it back"):
        first.release()
    with pytest.raises(UBCapacityError, match="9 rows do not fit a receive buffer of 8 rows"):
        pool.lease(9)


# -- headers -----------------------------------------------------------------------------------------------------

HEADER = Header("backward", 3, 8, 5, 2, 1 << 33, 4, torch.bfloat16, 4096, 17)


def test_headers_survive_the_wire() -> None:
    assert unpack(HEADER.pack(), 1, 0) == HEADER
    assert peer_failure(HEADER.pack(), 1, 0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "forward"},
        {"step": 4},
        {"microbatches": 9},
        {"stage": 6},
        {"microbatch": 3},
        {"tokens": 5},
        {"blocks": 3},
        {"dtype": torch.float32},
        {"width": 8},
    ],
)
def test_headers_that_differ_name_both_ranks_and_values(change: dict) -> None:
    (name, value), wrong = next(iter(change.items())), replace(HEADER, **change)
    with pytest.raises(UBRankMismatchError) as caught:
        check(wrong, HEADER, 6, 7)
    text = str(caught.value)
    assert f"{name} differs between rank 6 and rank 7" in text
    assert f"rank 6 sent {name} {value}" in text
    assert f"rank 7 expects {name} {getattr(HEADER, name)}" in text


def test_unknown_tokens_and_acknowledgements_are_not_compared() -> None:
    check(replace(HEADER, tokens=77, consumed=3), replace(HEADER, tokens=None), 0, 1)


def test_foreign_headers_are_refused() -> None:
    words = HEADER.pack()
    words[0] = 7
    with pytest.raises(UBRankMismatchError, match=f"begins with 0x7, 1; it expects {MAGIC:#x}"):
        unpack(words, 0, 1)


def test_failures_travel_with_their_kind() -> None:
    words = pack_abort(UBTimeoutError("rank 2 waits for " + "é" * 400))
    failure = peer_failure(words, 2, 1)
    assert isinstance(failure, UBTimeoutError)
    assert "rank 1 stops, as rank 2 reports a failure: UBTimeoutError: rank 2 waits for éé" in str(failure)
    assert type(peer_failure(pack_abort(KeyError("x")), 2, 1)) is UBStateError


def test_dtypes_that_do_not_travel() -> None:
    with pytest.raises(UBUnsupportedError, match=r"torch\.int8 does not travel between stages"):
        check_dtype(torch.int8)


# -- one rank, without torch.distributed --------------------------------------------------------------------------


def alone(*chunks, commits=None, **options) -> PipelineRunner:
    transport = PipelineTransport(capacity=(8, 4), dtype=torch.float64, poison=True, **options)
    return PipelineRunner(chunks, transport, commits=commits)


@pytest.mark.parametrize("edges", [True, False], ids=["edges", "tensors"])
def test_one_rank_needs_no_process_group(edges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where autograd takes tensors only as what a backward starts from (torch before 2.7)."""
    monkeypatch.setattr(stage_module, "_EDGES", edges and stage_module._EDGES)
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)

    def first(hidden, blocks, tokens):
        x = torch.arange(4.0 * tokens, dtype=torch.float64).view(tokens, 4) * weight
        return x.sin(), [x]

    def last(hidden, blocks, tokens):
        return (hidden * blocks[0] * weight).sum(), []

    runner = alone(first, last, commits=[1, 0])
    result = runner.step([3, 8, 5])
    assert result.traffic.messages == 0
    got, weight.grad = weight.grad, None
    for tokens in (3, 8, 5):
        hidden, (block,) = first(None, [], tokens)
        last(hidden, [block], tokens)[0].backward()
    torch.testing.assert_close(got, weight.grad, rtol=0, atol=1e-12)
    assert runner.store.empty


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (lambda h, b, t: (torch.ones(t + 1, 4, dtype=torch.float64), []), r"\[4, 4\]: T = 3, tp = 1 make it \[3, 4\]"),
        (lambda h, b, t: (torch.ones(t, 4), []), "is torch.float32 on cpu; this transport is for torch.float64 on cpu"),
        (lambda h, b, t: (torch.ones(t, 4, dtype=torch.float64), [1]), "committed 1 blocks, it was built for 0"),
    ],
)
def test_a_chunk_that_returns_something_else(chunk, says: str) -> None:
    runner = alone(chunk, lambda h, b, t: (h.sum(), []))
    with pytest.raises(UBShapeError, match=says):
        runner.step([3])
    assert runner.store.empty


def test_the_last_chunk_returns_a_scalar() -> None:
    with pytest.raises(UBShapeError, match=r"the last stage returns its loss, one number, not \[3, 4\]"):
        alone(lambda h, b, t: (torch.ones(t, 4, dtype=torch.float64), [])).step([3])


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (9, "T = 9 tokens exceed the pipeline's capacity of 8 tokens"),
        (3, "T = 3 does not split over tp = 2 ranks; the next valid T is 4"),
        (0, "T = 0: a microbatch has tokens; the next valid T is 2"),
    ],
)
def test_tokens_that_do_not_fit(tokens: int, says: str) -> None:
    with pytest.raises(UBShapeError, match=says):
        alone(lambda *_: None, tp=2).step([tokens])

# SPDX-License-Identifier: Apache-2.0
"""Hierarchical attention on 4 and 8 CPU ranks against dense attention in float64, sequence by sequence."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ub_dynamic.cp import HierarchicalTHDAttention, Partition, plan, ring
from ub_dynamic.errors import UBAlignmentError, UBRankMismatchError, UBShapeError, UBTimeoutError, UBUnsupportedError
from ub_dynamic.packing import PackedBatch
from ub_dynamic.testing.attention import Case, errors_against_dense, hierarchical_groups, random_qkv

TOLERANCE = 1e-10
LENGTHS = {
    "mixed": (13, 40, 7, 1, 0),
    "multiples": (64, 16, 32),
    "one token": (1,),
    "mostly empty": (0, 5, 0),
    "one huge among tiny": (301, *[3] * 20, 1, 1, 0, 17),
    "around a multiple": (15, 17),
}


@pytest.fixture(autouse=True)
def world() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))


@pytest.fixture(scope="module")
def groups():
    """Groups by the size of the all-to-all; made once, and in the same order on every rank."""
    made: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}

    def get(inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if inner not in made:
            made[inner] = hierarchical_groups(inner)
        return made[inner]

    return get


def check(case: Case, groups, inner: int) -> None:
    errors = errors_against_dense(case, *groups(inner))
    assert max(errors[name] for name in ("out", "dq", "dk", "dv")) <= TOLERANCE, errors
    assert errors["padding"] == 0, errors


@pytest.mark.mpi(4, launcher="torchrun")
@pytest.mark.parametrize("inner", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_against_dense_on_four_ranks(groups, inner, lengths, causal) -> None:
    for kv_heads in (8, 4, 1):  # one key head on four ranks: replicated
        for tail, align in (("ghost", 1), ("extend_last", 16), ("ghost_padding", 16)):
            check(Case(lengths, heads=8, groups=kv_heads, causal=causal, tail=tail, align=align), groups, inner)


@pytest.mark.mpi(8, launcher="torchrun")
@pytest.mark.parametrize("inner", [2, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_against_dense_on_eight_ranks(groups, inner, causal) -> None:
    for lengths in LENGTHS.values():
        check(Case(lengths, heads=8, groups=4, causal=causal), groups, inner)


@pytest.mark.mpi(4, launcher="torchrun")
@pytest.mark.parametrize("inner", [1, 2, 4])
def test_every_partition_without_a_causal_mask(groups, inner) -> None:
    cp = 4
    for lengths in LENGTHS.values():
        check(Case(lengths, heads=4, causal=False, partition=Partition.contiguous()), groups, inner)
        check(Case(lengths, heads=4, causal=False, partition=shuffled(lengths, cp)), groups, inner)
    for ranks in (None, (1, 4), (4, 1), (2, 2)):
        grid = Partition.grid2d(8, 4, ranks)
        check(Case((32, 64), heads=4, causal=False, partition=grid), groups, inner)


def shuffled(lengths: tuple[int, ...], cp: int) -> Partition:
    """Random rows of every sequence for every rank."""
    batch, draw = Case(lengths).batch(cp), random.Random(7)
    rows: list[list[int]] = [[] for _ in range(cp)]
    for start, length in zip(batch.cu_seqlens_padded, batch.padded, strict=False):
        members = list(range(start, start + length))
        draw.shuffle(members)
        for rank in range(cp):
            rows[rank] += members[rank::cp]
    return Partition.custom(rows)


@pytest.mark.mpi(4, launcher="torchrun")
def test_two_hundred_steps_with_and_without_padding_in_turns(groups) -> None:
    cases = [Case((13, 40, 7), heads=4), Case((16, 32), heads=4)]
    module = HierarchicalTHDAttention(*groups(2))
    batches = [case.batch(4) for case in cases]

    def step(index: int) -> list[torch.Tensor]:
        rows = Partition.zigzag().indices(batches[index], module.cp_rank)
        qkv, grad = random_qkv(cases[index], batches[index].total_tokens)
        local = [x[rows].requires_grad_() for x in qkv]
        module(*local, batches[index]).backward(grad[rows])
        return [x.grad for x in local if x.grad is not None]

    alone = [step(0), step(1)]
    for number in range(200):
        for got, wanted in zip(step(number % 2), alone[number % 2], strict=True):
            assert torch.equal(got, wanted), number


@pytest.mark.mpi(4, launcher="torchrun")
def test_half_types_and_their_wire(groups) -> None:
    """bfloat16 inputs: merged and added in float32, so errors are those of rounding the result."""
    case = Case((13, 40, 7, 1, 0), heads=4)
    exact = HierarchicalTHDAttention(*groups(1))
    batch = case.batch(4)
    rows = Partition.zigzag().indices(batch, exact.cp_rank)
    qkv, grad = random_qkv(case, batch.total_tokens)

    def run(module: HierarchicalTHDAttention, dtype: torch.dtype) -> list[torch.Tensor]:
        local = [x.to(torch.bfloat16).to(dtype)[rows].requires_grad_() for x in qkv]
        out = module(*local, batch)
        assert out.dtype == dtype
        out.backward(grad.to(torch.bfloat16).to(dtype)[rows])
        return [out.detach(), *(x.grad for x in local if x.grad is not None)]

    wanted = run(exact, torch.float64)
    for wire, tolerance in ((None, 0.02), (torch.bfloat16, 0.03)):
        got = run(HierarchicalTHDAttention(*groups(1), wire_dtype=wire), torch.bfloat16)
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == torch.bfloat16
            assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.mpi(4, launcher="torchrun")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(groups, reentrant) -> None:
    case = Case((13, 40, 7), heads=4)
    module = HierarchicalTHDAttention(*groups(2))
    batch = case.batch(4)
    rows = Partition.zigzag().indices(batch, module.cp_rank)
    qkv, grad = random_qkv(case, batch.total_tokens)
    results = []
    for call in (module, lambda *args: checkpoint(module, *args, use_reentrant=reentrant)):
        local = [x[rows].requires_grad_() for x in qkv]
        out = call(*local, batch)
        out.backward(grad[rows])
        results.append([out.detach(), *(x.grad for x in local)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.mpi(4, launcher="torchrun")
def test_refusals_come_before_anything_is_sent(groups) -> None:
    a2a, p2p = groups(2)
    module = HierarchicalTHDAttention(a2a, p2p)
    batch = PackedBatch.from_lengths([32], cp=4)
    q = torch.zeros(batch.local_tokens, 4, 8)
    with pytest.raises(UBShapeError, match=r"cp = 2, the groups have A\*P = 4 ranks"):
        module(q, q, q, PackedBatch.from_lengths([32], cp=2))
    with pytest.raises(UBShapeError, match=r"q has shape \(7, 4, 8\).*T/cp = 8"):
        module(q[:7], q, q, batch)
    with pytest.raises(UBShapeError, match="v is torch.float64"):
        module(q, q, q.double(), batch)
    with pytest.raises(UBShapeError, match="the head size of q, 8"):
        module(q, q[..., :4], q, batch)
    with pytest.raises(UBAlignmentError, match="H = 3 query heads.*A = 2.*next valid H is 4"):
        module(q[:, :3], q[:, :1], q[:, :1], batch)
    with pytest.raises(UBAlignmentError, match="H = 4 query heads must be a multiple of Hk = 3"):
        module(q, q[:, :3], q[:, :3], batch)
    with pytest.raises(UBUnsupportedError, match="'contiguous'.*'zigzag' only"):
        module(q, q, q, batch, partition=Partition.contiguous())
    with pytest.raises(UBUnsupportedError, match="kernel 'torch'.*CUDA"):
        HierarchicalTHDAttention(a2a, p2p, kernel="torch")(q, q, q, batch)
    with pytest.raises(UBShapeError, match="kernel = 'best'"):
        HierarchicalTHDAttention(a2a, p2p, kernel="best")(q, q, q, batch)
    with pytest.raises(UBRankMismatchError, match="in common and no other"):
        HierarchicalTHDAttention(a2a, a2a)
    check(Case((32,), heads=4), groups, 2)  # every rank is still in step


@pytest.mark.mpi(4, launcher="torchrun")
def test_a_wait_that_ends_names_the_peers(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "setup_timeout_s", lambda: 0.3)
    _, p2p = hierarchical_groups(1)  # of its own, since what is not received in time may come later
    if dist.get_rank() == 0:
        with pytest.raises(UBTimeoutError, match=r"rank 0 waited 0\.3 s for a ring transfer to rank 1 and from rank 3"):
            ring.Ring(p2p).shift(torch.zeros(4)).wait()
    dist.barrier()


@pytest.mark.mpi(4, launcher="torchrun")
def test_a_wrong_section_is_seen(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison bites: padding counted as real, as by TE with the wrong flag, gives wrong results."""
    case = Case((698,), heads=4)
    check(case, groups, 1)

    def as_if_unpadded(batch, parts, rank, first=True, second=True):
        return torch.tensor(batch.padded) // (2 * parts) * (first + second)

    monkeypatch.setattr(plan, "zigzag_counts", as_if_unpadded)
    plan.ring_plan.cache_clear()
    errors = errors_against_dense(case, *groups(1))
    plan.ring_plan.cache_clear()
    assert errors["out"] > 0.01, errors

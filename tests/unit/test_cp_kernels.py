# SPDX-License-Identifier: Apache-2.0
"""Sections, the reference kernel, the merge of partial softmaxes, and moving rows: against dense float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from ub_dynamic.cp import Partition
from ub_dynamic.cp.kernels import ReferenceKernel, cannot, choose_kernel
from ub_dynamic.cp.merge import Merge, merge_torch
from ub_dynamic.cp.plan import copy_tensors, ring_plan, zigzag_counts
from ub_dynamic.cp.rows import take_rows
from ub_dynamic.cp.sections import DeviceSection, Section
from ub_dynamic.errors import UBShapeError, UBUnsupportedError
from ub_dynamic.packing import PackedBatch
from ub_dynamic.testing.attention import Case, dense_attention, random_qkv

LENGTHS = [(13, 40, 7, 1, 0), (64, 32), (1,), (0, 5, 0), (99, 3, 3, 3)]


def on_cpu(part: Section) -> DeviceSection:
    return DeviceSection(part, *part.tables(), part.q.rows(), part.k.rows())


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_reference_kernel_against_dense(lengths: tuple[int, ...], causal: bool, groups: int) -> None:
    case = Case(lengths, groups=groups, causal=causal, align=8)
    batch = case.batch(1)
    (q, k, v), grad = random_qkv(case, batch.total_tokens)
    (part,) = ring_plan(batch, Partition.zigzag(), 1, 1, 0, causal).steps
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dense_attention(whole[0], whole[1], whole[2], batch, causal)
    expected.backward(grad)
    scale = 1 / math.sqrt(case.size)
    out, lse = ReferenceKernel().fwd((q, k, v), on_cpu(part), scale)
    grads = ReferenceKernel().bwd(grad, (q, k, v), out, lse, on_cpu(part), scale)
    assert (out - expected).abs().max() < 1e-14
    for got, x in zip(grads, whole, strict=True):
        assert x.grad is not None
        assert (got - x.grad).abs().max() < 1e-13
    real = Partition.zigzag().real_rows(batch, 0)
    assert not out[~real].any()
    assert all(not x[~real].any() for x in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reference_kernel_computes_half_types_in_float32(dtype: torch.dtype) -> None:
    case = Case((13, 40))
    batch = case.batch(1)
    (q, k, v), _ = random_qkv(case, batch.total_tokens, dtype=dtype)
    (part,) = ring_plan(batch, Partition.zigzag(), 1, 1, 0, True).steps
    out, lse = ReferenceKernel().fwd((q, k, v), on_cpu(part), 0.3)
    exact, exact_lse = ReferenceKernel().fwd((q.double(), k.double(), v.double()), on_cpu(part), 0.3)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert (lse - exact_lse).abs().max() < 1e-5
    assert (out - exact).abs().max() <= max(torch.finfo(dtype).eps, 1e-6)


def test_known_sections() -> None:
    """Two sequences of 13 in 16 and 8 in 8 rows, a ring of 2: chunks of 4 and 2 rows."""
    batch = PackedBatch.from_lengths([13, 8], cp=2)
    first, second = (ring_plan(batch, Partition.zigzag(), 1, 2, rank, True).steps for rank in (0, 1))
    # Rank 0 holds chunks 0 and 3: 4 + 1 and 2 + 2 real tokens. Rank 1 holds 1 and 2: 8 and 4.
    known = [
        (first[0], ([0, 8], [5, 4], [0, 8], [5, 4]), 8, 8, True),
        (first[1], ([4, 10], [1, 2], [0, 8], [8, 4]), 4, 8, False),
        (second[0], ([0, 8], [8, 4], [0, 8], [8, 4]), 8, 8, True),
        (second[1], ([0, 8], [8, 4], [0, 8], [4, 2]), 8, 4, False),
    ]
    for part, ranges, max_q, max_k, causal in known:
        assert tuple(one.tolist() for one in (*part.q, *part.k)) == ranges
        assert (part.rows, part.max_q, part.max_k, part.causal) == (12, max_q, max_k, causal)
    assert zigzag_counts(batch, 2, 0).tolist() == [5, 4]
    assert zigzag_counts(batch, 2, 0, second=False).tolist() == [4, 2]


@pytest.mark.parametrize("causal", [True, False])
def test_sections_of_all_ranks_cover_every_pair_once(causal: bool) -> None:
    """Brute force: which query token meets which key token, over all ranks and steps."""
    draw = random.Random(3)
    for _ in range(60):
        outer, inner = draw.choice([1, 2, 3, 4]), draw.choice([1, 2])
        lengths = [draw.choice((0, 1, draw.randrange(40))) for _ in range(draw.randrange(1, 5))]
        if not any(lengths):
            continue
        batch = PackedBatch.from_lengths(lengths, cp=outer * inner, tail="ghost_padding", align=draw.choice([1, 8]))
        partition = Partition.zigzag() if causal else draw.choice([Partition.zigzag(), Partition.contiguous()])
        plans = [ring_plan(batch, partition, inner, outer, rank, causal) for rank in range(outer)]
        held = []  # packed row of every row of a group, in the plan's order
        for rank, one in enumerate(plans):
            arriving = torch.cat([partition.indices(batch, rank * inner + a) for a in range(inner)])
            held.append(arriving if one.order is None else arriving[one.order])
        met = torch.zeros(batch.total_tokens, batch.total_tokens, dtype=torch.int64)
        for rank, one in enumerate(plans):
            for step, part in enumerate(one.steps):
                source = (rank - step) % outer
                for queries, of in part.slices:
                    rows, keys = held[rank][queries], held[source][of]
                    pairs = torch.ones(len(rows), len(keys), dtype=torch.int64)
                    met[rows[:, None], keys[None, :]] += pairs.tril() if part.causal else pairs
                    assert len(rows) <= part.max_q
                    assert len(keys) <= part.max_k
        expected = torch.zeros_like(met)
        for start, length in zip(batch.cu_seqlens_padded, batch.seqlens, strict=False):
            pairs = torch.ones(length, length, dtype=torch.int64)
            expected[start : start + length, start : start + length] = pairs.tril() if causal else pairs
        assert torch.equal(met, expected), (lengths, inner, outer)


def test_merge_is_the_softmax_over_all_parts() -> None:
    """More parts than are folded at once, rows without a part, and anything where a mask is 0."""
    torch.manual_seed(0)
    rows, heads, size, parts = 6, 3, 5, 11
    scores, values = (
        torch.randn(parts, rows, heads, dtype=torch.float64),
        torch.randn(parts, rows, heads, size).double(),
    )
    mask = (torch.rand(parts, rows) < 0.5).to(torch.uint8)
    mask[:, 2] = 0
    mask[:, 3] = 1
    merge = Merge(lambda: torch.zeros(0))
    for out, lse, used in zip(values, scores, mask, strict=True):
        junk = torch.where(used[:, None] == 1, lse, torch.tensor(math.nan, dtype=torch.float64))
        merge.add(out, junk, used)
    out, lse = merge.finish()
    hidden = scores.masked_fill(mask[..., None] == 0, -math.inf)
    expected = (hidden.softmax(0).nan_to_num()[..., None] * values).sum(0)
    assert (out - expected).abs().max() < 1e-14
    assert torch.equal(lse[2], torch.full((heads,), -math.inf, dtype=torch.float64))
    assert not out[2].any()
    seen = [row for row in range(rows) if mask[:, row].any()]
    assert (lse[seen] - hidden.logsumexp(0)[seen]).abs().max() < 1e-14


def test_merge_of_nothing() -> None:
    out, lse = Merge(lambda: torch.zeros(4, 2, 3, dtype=torch.bfloat16)).finish()
    assert not out.any()
    assert (lse.dtype, lse.shape) == (torch.float32, (4, 2))
    assert torch.isinf(lse).all()


def test_merge_of_half_types_rounds_once() -> None:
    torch.manual_seed(0)
    outs = [torch.randn(5, 2, 4).to(torch.bfloat16) for _ in range(4)]
    logs = [torch.randn(5, 2) for _ in range(4)]
    ones = torch.ones(5, dtype=torch.uint8)
    got, _ = merge_torch([(o, s, ones) for o, s in zip(outs, logs, strict=True)], None, torch.bfloat16)
    weights = torch.stack(logs).double().softmax(0)[..., None]
    wanted = (weights * torch.stack(outs).double()).sum(0)
    assert (got - wanted).abs().max() <= torch.finfo(torch.bfloat16).eps * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("width", [1, 3, 8, 24])
def test_take_rows(dtype: torch.dtype, width: int) -> None:
    source = torch.randint(0, 100, (7, 2 * width)).to(dtype)
    index = torch.tensor([6, 0, 3, 3])
    for given in (index, index.to(torch.int32)):
        assert torch.equal(take_rows(source, given), source[index])
        out = torch.zeros(4, 3 * width, dtype=dtype)
        take_rows(source[:, width:], given, out[:, width : 2 * width])
        assert torch.equal(out[:, width : 2 * width], source[index, width:])
        assert not out[:, :width].any()
        assert not out[:, 2 * width :].any()
    assert torch.equal(take_rows(source.view(7, width, 2), index), source.view(7, width, 2)[index])
    assert torch.equal(take_rows(source.t(), None), source.t())


def test_tables_keep_types_and_shapes() -> None:
    tensors = [
        torch.arange(5, dtype=torch.int32),
        torch.ones(2, 3, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.int64),
    ]
    for got, wanted in zip(copy_tensors(torch.device("cpu"), tensors), tensors, strict=True):
        assert torch.equal(got, wanted)
        assert got.dtype == wanted.dtype


def test_which_kernel() -> None:
    half, full = torch.zeros(2, 2, 8, dtype=torch.bfloat16), torch.zeros(2, 2, 8, dtype=torch.float64)
    assert choose_kernel("auto", half, half).name == "reference"
    assert choose_kernel("reference", full, full).name == "reference"
    for name in ("te", "torch"):
        with pytest.raises(UBUnsupportedError, match=f"kernel '{name}' cannot.*needs CUDA tensors"):
            choose_kernel(name, half, half)
    with pytest.raises(UBShapeError, match="kernel = 'fast'.*'auto'"):
        choose_kernel("fast", half, half)


def test_what_gpu_kernels_refuse() -> None:
    class OnCuda:
        is_cuda, is_floating_point = True, True

        def __init__(self, size: int, dtype: torch.dtype = torch.bfloat16) -> None:
            self.shape, self.dtype, self.device = (4, 2, size), dtype, "cuda:0"

    def reason(name: str, size: int, value_size: int, dtype: torch.dtype = torch.bfloat16) -> str | None:
        return cannot(name, OnCuda(size, dtype), OnCuda(value_size, dtype))  # type: ignore[arg-type]

    assert reason("torch", 128, 128) is None
    assert reason("te", 192, 128) is None
    assert "float32" in str(reason("te", 128, 128, torch.float32))
    assert "must be equal" in str(reason("torch", 192, 128))
    assert "multiples of 8" in str(reason("te", 100, 100))
    assert "multiples of 8 up to 256" in str(reason("torch", 512, 512))

# SPDX-License-Identifier: Apache-2.0
"""The parts of hierarchical attention that run on a GPU, in one process: kernels on sections, the merge, moved rows."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch

from ub_dynamic.cp import HierarchicalTHDAttention, Partition
from ub_dynamic.cp.kernels import ReferenceKernel, choose_kernel
from ub_dynamic.cp.merge import merge_torch, triton_merge
from ub_dynamic.cp.plan import ring_plan
from ub_dynamic.cp.rows import take_rows
from ub_dynamic.errors import UBStateError
from ub_dynamic.packing import PackedBatch

pytestmark = pytest.mark.gpu
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
KERNELS = ["torch", pytest.param("te", marks=pytest.mark.skipif(not HAS_TE, reason="needs Transformer Engine"))]
HEADS, GROUPS, SIZE = 4, 2, 64
TOLERANCE = 3.5e-2  # of TE's own tests, for grouped-query attention in bfloat16


def random(rows: int, heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, heads, SIZE, device="cuda", generator=generator).clamp(-1, 1).to(torch.bfloat16)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengths", [(300, 512, 7, 0, 64), (256, 512)], ids=["padded", "full"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_sections_of_a_ring_against_the_reference(name: str, lengths: tuple[int, ...], rank: int, causal: bool) -> None:
    """Both steps of a ring of 2 as one rank computes them: whole, first-half and second-half sections."""
    batch = PackedBatch.from_lengths(lengths, cp=2)
    q, k, v, dout = (
        random(batch.local_tokens, count, seed) for seed, count in enumerate((HEADS, GROUPS, GROUPS, HEADS))
    )
    kernel, reference = choose_kernel(name, q, v), ReferenceKernel()
    plan = ring_plan(batch, Partition.zigzag(), 1, 2, rank, causal).on(q.device, kernel.compact)
    scale = 1 / math.sqrt(SIZE)
    for step, part in enumerate(plan.steps):
        if part.host.empty:
            continue
        used = plan.mask[step].bool()
        exact = [x.double() for x in (q, k, v, dout)]
        out, lse = kernel.fwd((q, k, v), part, scale)
        wanted, wanted_lse = reference.fwd(exact[:3], part, scale)
        torch.testing.assert_close(out.double(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(lse[used].double(), wanted_lse[used], atol=1e-3, rtol=1e-3)
        assert not out[~used].any()
        # The whole softmax is wider than the section: backward must take its lse, not the section's own.
        wider = wanted_lse + math.log(2)
        got = kernel.bwd(dout, (q, k, v), wanted.to(torch.bfloat16), wider.float(), part, scale)
        grads = reference.bwd(exact[3], exact[:3], wanted.to(torch.bfloat16).double(), wider, part, scale)
        # Rows outside must be exactly 0. A query that sees one key has the gradient 0 too, but as a difference of two
        # sums, which flash attention rounds differently: there only the tolerance counts.
        q_rows, k_rows = part.host.q.rows(), part.host.k.rows()
        for a, b, inside in zip(got, grads, (q_rows, k_rows, k_rows), strict=True):
            torch.testing.assert_close(a.double(), b, atol=TOLERANCE, rtol=TOLERANCE)
            outside = torch.ones(a.shape[0], dtype=torch.bool).index_fill_(0, inside, False)
            assert not a[outside.cuda()].any()
            assert not b[outside.cuda()].any()


@pytest.mark.parametrize("name", [*KERNELS, "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_without_other_ranks(name: str, causal: bool) -> None:
    batch = PackedBatch.from_lengths([300, 17, 1, 0, 512], align=8)
    whole = [random(batch.total_tokens, count, seed) for seed, count in enumerate((HEADS, GROUPS, GROUPS))]
    dout = random(batch.total_tokens, HEADS, 5)
    results = []
    for kernel, dtype in ((name, torch.bfloat16), ("reference", torch.float64)):
        local = [x.detach().to(dtype).requires_grad_() for x in whole]  # leaves, also where the type stays
        out = HierarchicalTHDAttention(None, None, kernel=kernel)(*local, batch, causal=causal)
        out.backward(dout.to(dtype))
        results.append([out.detach(), *(x.grad for x in local)])
    padding = ~Partition.zigzag().real_rows(batch, 0).cuda()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=TOLERANCE, rtol=TOLERANCE)
        assert not a[padding].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(100, 8, 128), (33, 3, 40), (5, 40, 192)])
def test_merge_in_one_launch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    merge = triton_merge()
    assert merge is not None
    rows, heads, _ = shape
    torch.manual_seed(0)
    for count, before in ((1, False), (2, False), (3, True), (4, True)):
        masks = (torch.rand(count, rows, device="cuda") < 0.7).to(torch.uint8)
        masks[:, 1] = 0
        outs = [torch.randn(shape, device="cuda").to(dtype) for _ in range(count)]
        logs = [torch.randn(rows, heads, device="cuda") for _ in range(count)]
        sums = (torch.randn(shape, device="cuda"), torch.randn(rows, heads, device="cuda")) if before else None
        wanted, terms, wanted_lse = _merged_in_float64(outs, logs, masks, sums)
        for out, log, mask in zip(outs, logs, masks, strict=True):
            out[mask == 0] = math.nan  # what no mask names is not read
            log[mask == 0] = math.nan
        got, got_lse = merge(list(zip(outs, logs, masks, strict=True)), sums, dtype)
        assert got.dtype == dtype
        # A sum in float32 is exact relative to its terms, not to what is left where they cancel; then it is rounded.
        rounded = torch.finfo(dtype).eps * wanted.abs().clamp_min(torch.finfo(dtype).tiny)
        allowed = 8 * torch.finfo(torch.float32).eps * terms + rounded
        assert ((got.double() - wanted).abs() <= allowed).all()
        torch.testing.assert_close(got_lse, wanted_lse.float())


def _merged_in_float64(
    outs: list[torch.Tensor],
    logs: list[torch.Tensor],
    masks: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The merged out, the same of the outs' absolute values, and lse, by the formula of the module's docstring."""

    def merge(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [(change(out.double()), log.double(), mask) for out, log, mask in zip(outs, logs, masks, strict=True)]
        before = None if sums is None else (change(sums[0].double()), sums[1].double())
        return merge_torch(parts, before, torch.float64)

    (wanted, lse), (terms, _) = merge(torch.clone), merge(torch.abs)
    return wanted, terms, lse


@pytest.mark.parametrize("width", [1, 3, 8, 24, 1024])
def test_take_rows(width: int) -> None:
    source = torch.randint(0, 1000, (77, 2 * width), device="cuda").to(torch.bfloat16)
    index = torch.randperm(77, device="cuda")
    for given in (index, index.to(torch.int32)):
        assert torch.equal(take_rows(source, given), source[index])
        out = torch.zeros(77, 3 * width, dtype=torch.bfloat16, device="cuda")
        take_rows(source[:, width:], given, out[:, width : 2 * width])
        assert torch.equal(out[:, width : 2 * width], source[index, width:])
        assert not out[:, 2 * width :].any()


def test_nothing_waits_for_the_device_and_a_graph_can_be_captured() -> None:
    batch = PackedBatch.from_lengths([300, 512, 17], cp=1, align=8)
    local = [
        random(batch.total_tokens, count, seed).requires_grad_() for seed, count in enumerate((HEADS, GROUPS, GROUPS))
    ]
    module = HierarchicalTHDAttention(None, None, kernel="torch")
    dout = random(batch.total_tokens, HEADS, 5)

    def step() -> list[torch.Tensor]:
        for x in local:
            x.grad = None
        out = module(*local, batch)
        out.backward(dout)
        return [out.detach(), *(x.grad for x in local if x.grad is not None)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured[0], eager[0])
    for a, b in zip(captured, eager, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)

    other = PackedBatch.from_lengths([829], align=8)
    inputs = [random(other.total_tokens, count, 0) for count in (HEADS, GROUPS, GROUPS)]  # no generators in a capture
    with (
        pytest.raises(UBStateError, match="run the batch once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        module(*inputs, other)

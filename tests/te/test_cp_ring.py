# SPDX-License-Identifier: Apache-2.0
"""TE's ring attention, its own Python code on CPU ranks: the padding rule, and what the patches change."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("NVTE_TORCH_COMPILE", "0")

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformer_engine")
from cp_emulation import READS, STRAY, CountOps, on_cpu, te_attention  # type: ignore[import-not-found]

from ub_dynamic.cp.current import packed
from ub_dynamic.cp.partition import Partition
from ub_dynamic.cp.te_patches import te_backward_patches
from ub_dynamic.packing import PackedBatch
from ub_dynamic.testing.attention import Case, dense_attention, hierarchical_groups, random_qkv

pytestmark = pytest.mark.te

PADDED, FULL = (13, 40, 7, 1, 0), (64, 32, 16)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with on_cpu():
        yield


def groups(comm_type: str):  # type: ignore[no-untyped-def]
    return list(hierarchical_groups(2)) if comm_type == "a2a+p2p" else dist.group.WORLD


class Run:
    """One forward and backward on this rank's rows."""

    def __init__(self, lengths, comm_type, *, causal=True, pad=None, grad_scale=1.0, **options) -> None:  # type: ignore[no-untyped-def]
        cp, rank = dist.get_world_size(), dist.get_rank()
        self.case = Case(lengths, heads=4, groups=2, causal=causal)
        self.batch = options.pop("batch", None) or self.case.batch(cp)
        self.rows = Partition.zigzag().indices(self.batch, rank)
        qkv, grad = random_qkv(self.case, self.batch.total_tokens)
        self.whole, self.grad = qkv, grad * grad_scale
        self.local = [x[self.rows].requires_grad_() for x in qkv]
        self.count = CountOps()
        self.reads = -len(READS)
        with self.count:
            self.out = te_attention(
                self.local, self.batch, groups(comm_type), comm_type, causal=causal, pad=pad, **options
            )

    def backward(self) -> Run:
        with self.count:
            self.out.backward(self.grad[self.rows])
        self.reads += len(READS)
        return self

    def tensors(self) -> list[torch.Tensor]:
        return [self.out.detach(), *(x.grad for x in self.local if x.grad is not None)]

    def errors(self) -> list[float]:
        whole = [x.clone().requires_grad_() for x in self.whole]
        expected = dense_attention(*whole, self.batch, self.case.causal)
        expected.backward(self.grad)
        wanted = [expected.detach()[self.rows], *(x.grad[self.rows] for x in whole if x.grad is not None)]
        real = Partition.zigzag().real_rows(self.batch, dist.get_rank())
        found = [
            float((a - b)[real].abs().max()) if real.any() else 0.0 for a, b in zip(self.tensors(), wanted, strict=True)
        ]
        worst = torch.tensor(found)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return worst.tolist()


@pytest.mark.mpi(2, 4, launcher="torchrun")
@pytest.mark.parametrize("lengths", [PADDED, FULL], ids=["padded", "full"])
@pytest.mark.parametrize("causal", [True, False])
def test_emulation_is_exact(lengths, causal) -> None:  # type: ignore[no-untyped-def]
    assert max(Run(lengths, "p2p", causal=causal).backward().errors()) < 1e-5


@pytest.mark.mpi(4, launcher="torchrun")
def test_wrong_flag_gives_wrong_rows() -> None:
    """TE issue #3331: 698 tokens in 704 rows at cp 4 with pad_between_seqs False."""
    assert max(Run((698,), "p2p", pad=True).backward().errors()) < 1e-5
    assert Run((698,), "p2p", pad=False).backward().errors()[0] > 0.01


@pytest.mark.mpi(2, 4, launcher="torchrun")
@pytest.mark.parametrize("lengths", [PADDED, FULL], ids=["padded", "full"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("comm_type", ["p2p", "a2a+p2p"])
def test_patches_keep_every_bit_and_launch_less(lengths, causal, comm_type) -> None:  # type: ignore[no-untyped-def]
    if comm_type == "a2a+p2p" and dist.get_world_size() == 2:
        pytest.skip("a2a+p2p needs two ranks in each group")
    stock = Run(lengths, comm_type, causal=causal).backward()
    with te_backward_patches() as patches:
        assert not patches.refused
        with packed(stock.batch):
            Run(lengths, comm_type, causal=causal).backward()  # makes the tables
            ours = Run(lengths, comm_type, causal=causal).backward()
    for a, b in zip(stock.tensors(), ours.tensors(), strict=True):
        assert torch.equal(a, b)
    assert len(ours.count.ops) < 0.75 * len(stock.count.ops), (sorted(stock.count.ops), sorted(ours.count.ops))
    if causal and comm_type == "p2p":
        # Halves of keys and values in every step behind the own one, of q, out and dout in those before it.
        behind, before = dist.get_rank(), dist.get_world_size() - 1 - dist.get_rank()
        assert stock.reads == 4 * (behind + before)
        assert ours.reads == 2 * behind + 4 * bool(before)


@pytest.fixture
def stray() -> Iterator[None]:
    """Kernels that leave something in the gradients of keys without queries."""
    STRAY.append(3.0)
    yield
    STRAY.clear()


@pytest.mark.mpi(2, 4, launcher="torchrun")
@pytest.mark.usefixtures("stray")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("comm_type", ["p2p", "a2a+p2p"])
def test_patches_define_the_gradients_of_short_sequences(causal, comm_type) -> None:  # type: ignore[no-untyped-def]
    """TE issue #2186: where the last chunk is all padding, dk and dv of real tokens get what is in the workspace."""
    if comm_type == "a2a+p2p" and dist.get_world_size() == 2:
        pytest.skip("a2a+p2p needs two ranks in each group")
    stock = Run(PADDED, comm_type, causal=causal).backward()
    out, dq, dk, dv = stock.errors()
    assert max(out, dq) < 1e-5
    assert min(dk, dv) > 1
    with te_backward_patches():
        with packed(stock.batch):
            known = Run(PADDED, comm_type, causal=causal).backward()
        real, padded = (x.clone() for x in vars(stock.batch.device_metadata("cpu")).values())
        unknown = Run(PADDED, comm_type, causal=causal, boundaries=(real, padded)).backward()
    assert max(known.errors()) < 1e-5
    assert max(unknown.errors()) < 1e-5
    assert len(known.count.ops) < len(unknown.count.ops)
    with te_backward_patches(skip_unseen=False), packed(stock.batch):
        assert min(Run(PADDED, comm_type, causal=causal).backward().errors()[2:]) > 1


@pytest.mark.mpi(2, launcher="torchrun")
@pytest.mark.usefixtures("stray")
def test_sequences_without_such_chunks_are_the_same_in_every_bit() -> None:
    stock = Run((13, 40, 7, 10), "p2p").backward()
    with te_backward_patches(), packed(stock.batch):
        ours = Run((13, 40, 7, 10), "p2p").backward()
    assert all(map(torch.equal, stock.tensors(), ours.tensors()))
    assert max(ours.errors()) < 1e-5


@pytest.mark.mpi(2, launcher="torchrun")
def test_explicit_true_on_a_full_batch_keeps_every_bit() -> None:
    stock = Run(FULL, "p2p", pad=True).backward()
    with te_backward_patches(), packed(stock.batch):
        ours = Run(FULL, "p2p", pad=True).backward()
    assert all(map(torch.equal, stock.tensors(), ours.tensors()))


@pytest.mark.mpi(2, launcher="torchrun")
def test_flash_attention_backward_reads_nothing_back() -> None:
    def reads(run: Run) -> int:
        return sum("_local_scalar_dense" in name for name in run.count.ops)

    stock = Run(FULL, "p2p", fused=False).backward()
    assert max(stock.errors()) < 1e-5
    assert reads(stock) == 3
    with te_backward_patches(), packed(stock.batch):
        ours = Run(FULL, "p2p", fused=False).backward()
    assert reads(ours) == 0
    assert all(map(torch.equal, stock.tensors(), ours.tensors()))
    with te_backward_patches(no_sync=False), packed(stock.batch):
        assert reads(Run(FULL, "p2p", fused=False).backward()) == 3


@pytest.mark.mpi(2, launcher="torchrun")
def test_batches_found_by_their_own_tensors() -> None:
    stock = Run(FULL, "p2p").backward()
    with te_backward_patches():
        with packed(stock.batch):
            pass
        ours = Run(FULL, "p2p", batch=stock.batch).backward()
    assert len(ours.count.ops) < len(stock.count.ops)
    assert all(map(torch.equal, stock.tensors(), ours.tensors()))


@pytest.mark.mpi(2, launcher="torchrun")
def test_alternating_batches_with_backwards_of_earlier_forwards() -> None:
    """200 steps in the order of a pipeline: forward i+1 runs before backward i."""
    stock = {lengths: Run(lengths, "p2p").backward().tensors() for lengths in (PADDED, FULL)}
    with te_backward_patches():
        waiting = None
        for step in range(200):
            lengths = FULL if step % 2 else PADDED
            batch = Case(lengths, heads=4, groups=2).batch(dist.get_world_size())
            with packed(batch):
                run = Run(lengths, "p2p", batch=batch)
            if waiting is not None:
                waiting.backward()
                assert all(map(torch.equal, waiting.tensors(), stock[waiting.case.lengths])), step
            waiting = run


@pytest.mark.mpi(2, launcher="torchrun")
def test_tail_of_unknown_boundaries_ends_in_stock_and_is_zeroed_with_patches() -> None:
    batch = Case(PADDED, heads=4, groups=2).batch(2)
    tail = PackedBatch.from_lengths((*PADDED, 16), cp=2)
    assert tail.total_tokens == batch.total_tokens + 16
    boundaries = tuple(torch.tensor(one, dtype=torch.int32) for one in (batch.cu_seqlens, batch.cu_seqlens_padded))

    def run() -> Run:
        # Tensors of the longer batch, boundaries of the shorter: 8 rows a rank belong to no sequence.
        return Run((*PADDED, 16), "p2p", batch=tail, boundaries=boundaries, pad=True, max_seqlen=batch.max_seqlen)

    with pytest.raises(IndexError):
        run().backward()
    with te_backward_patches():
        done = run().backward()
    for grad in done.tensors()[1:]:
        assert not grad[-8:].any()
        assert grad[:-8].any()


@pytest.mark.mpi(2, launcher="torchrun")
def test_known_tail_is_named_before_anything_is_sent() -> None:
    batch = Case(PADDED, heads=4, groups=2).batch(2)
    longer = PackedBatch.from_lengths((*PADDED, 16), cp=2)
    boundaries = tuple(torch.tensor(one, dtype=torch.int32) for one in (batch.cu_seqlens, batch.cu_seqlens_padded))
    with te_backward_patches(), packed(batch), pytest.raises(ValueError, match=r"tail of 16 rows.*device-side assert"):
        Run((*PADDED, 16), "p2p", batch=longer, boundaries=boundaries, pad=True)


@pytest.mark.mpi(2, launcher="torchrun")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_sees_its_own_batch(reentrant) -> None:  # type: ignore[no-untyped-def]
    """Copies of the boundaries, and another batch entered in between: bound to the output, the batch is still known."""
    stock = Run(FULL, "p2p").backward()
    other = Case(PADDED, heads=4, groups=2).batch(2)
    batch = stock.batch
    local = [x[stock.rows].requires_grad_() for x in stock.whole]
    used: list[int] = []

    def attention(q, k, v, real):  # type: ignore[no-untyped-def]
        real = real.clone()
        count = CountOps()
        try:
            with count:
                return te_attention(
                    (q, k, v), batch, dist.group.WORLD, "p2p", boundaries=(real, real.clone()), pad=False
                )
        finally:  # a recomputation stops by an exception once it has what it needs
            used.append(len(count.ops))

    with te_backward_patches():
        with packed(batch) as scope:
            attention(*local, batch.device_metadata("cpu").cu_seqlens)  # makes the tables
            out = checkpoint(attention, *local, batch.device_metadata("cpu").cu_seqlens, use_reentrant=reentrant)
            scope.bind_backward(out)
        with packed(other):
            pass
        out.backward(stock.grad[stock.rows])
    assert used[0] == used[1] == used[2], used
    assert torch.equal(out, stock.out)
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(local, stock.local, strict=True))  # type: ignore[arg-type]

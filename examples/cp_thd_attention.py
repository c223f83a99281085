# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on packed documents: pack, choose, scatter, attend, gather, compare with dense attention.

    python examples/cp_thd_attention.py                      # 4 processes on the CPU, over gloo
    torchrun --nproc-per-node 4 examples/cp_thd_attention.py --device cuda --kernel auto
    ub-dynamic one-gpu -n 4 -- python examples/cp_thd_attention.py --device cuda

With ``--device cuda`` and Transformer Engine, TE's own ring runs too, told what the host knows.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ub_dynamic.cp import (
    CPProblem,
    HierarchicalTHDAttention,
    Partition,
    choose_cp_comm,
    gather,
    packed,
    scatter,
    te_backward_patches,
    te_capabilities,
)
from ub_dynamic.packing import PackedBatch
from ub_dynamic.testing.attention import dense_attention, hierarchical_groups
from ub_dynamic.testing.launch import run_ranks


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[301, 40, 7, 1, 0, 64], help="of the documents")
    parser.add_argument("--ranks", type=int, default=4, help="processes, when this program starts them")
    parser.add_argument("--inner", type=int, default=2, help="ranks of the all-to-all over heads")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kernel", default="auto", help="auto, reference, torch or te")
    parser.add_argument("--partition", choices=["zigzag", "contiguous"], default="zigzag")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    if "RANK" not in os.environ:
        done = run_ranks(Path(__file__).resolve(), chosen.ranks, sys.argv[1:], launcher="torchrun", timeout=300)
        print(done.check().stdout, end="")
        return 0
    device = torch.device("cpu")
    if chosen.device == "cuda":
        from ub_dynamic.testing.one_gpu import device as own_device

        device = torch.device(own_device())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    compare(chosen, device)
    dist.destroy_process_group()
    return 0


def compare(chosen: argparse.Namespace, device: torch.device) -> None:
    cp, rank = dist.get_world_size(), dist.get_rank()
    partition = Partition.contiguous() if chosen.partition == "contiguous" else Partition.zigzag()
    causal = chosen.partition == "zigzag"  # a contiguous split is exact without a causal mask only
    batch = PackedBatch.from_lengths(chosen.lengths, cp=cp)
    plan = choose_cp_comm(
        CPProblem(
            batch,
            chosen.heads,
            chosen.kv_heads,
            chosen.head_size,
            mask="padding_causal" if causal else "padding",
            partition=partition,
        )
    )
    say(rank, f"{batch.documents} documents, {batch.real_tokens} tokens in T = {batch.total_tokens} rows")
    say(rank, f"choose_cp_comm: {plan.candidate}, {plan.cost.bytes / 1e6:.2f} MB sent by a rank in a layer")

    # The same packed tensors on every rank; float64 on the CPU, so that the comparison is exact.
    dtype = torch.float64 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    heads = (chosen.heads, chosen.kv_heads, chosen.kv_heads)
    whole = [torch.randn(batch.total_tokens, n, chosen.head_size, generator=generator).to(device, dtype) for n in heads]

    dense = [x.double().requires_grad_() for x in whole]
    expected = dense_attention(dense[0], dense[1], dense[2], batch, causal)
    expected.square().sum().backward()

    attention = HierarchicalTHDAttention(*hierarchical_groups(chosen.inner), kernel=chosen.kernel)
    ours = [x.clone().requires_grad_() for x in whole]
    rows = [scatter(x, batch, partition, dist.group.WORLD) for x in ours]
    out = gather(attention(*rows, batch, causal=causal, partition=partition), batch, partition, dist.group.WORLD)
    out.square().sum().backward()
    error = largest([out, *(x.grad for x in ours)], [expected, *(x.grad for x in dense)])
    say(
        rank,
        f"hierarchical, A = {chosen.inner}, P = {cp // chosen.inner}: largest error of out and gradients {error:.1e}",
    )
    assert error < (1e-10 if dtype == torch.float64 else 0.2), error

    if device.type == "cuda" and causal and te_capabilities().thd_p2p:
        error = largest([te_ring(chosen, batch, partition, whole)], [expected])
        say(rank, f"TE's ring with the host's knowledge: largest error of out {error:.1e}")
        assert error < 0.2, error


def te_ring(
    chosen: argparse.Namespace, batch: PackedBatch, partition: Partition, whole: list[torch.Tensor]
) -> torch.Tensor:
    """TE's DotProductAttention over all ranks, forward and backward, with nothing to read from the device."""
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(
        chosen.heads, chosen.head_size, num_gqa_groups=chosen.kv_heads, attention_dropout=0.0, qkv_format="thd"
    )
    ranks = list(range(dist.get_world_size()))
    module.set_context_parallel_group(dist.group.WORLD, ranks, torch.cuda.Stream(), "p2p")
    rows = [scatter(x, batch, partition, dist.group.WORLD).requires_grad_() for x in whole]
    with te_backward_patches(), packed(batch):
        out = module(*rows, **batch.dpa_kwargs(rows[0].device))
        out.float().square().sum().backward()
    return gather(out.detach().view(rows[0].shape), batch, partition, dist.group.WORLD)


def largest(got: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> float:
    """The largest error of any element, relative to the largest element of its tensor."""
    pairs = [(a.double(), b.double()) for a, b in zip(got, wanted, strict=True) if a is not None and b is not None]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

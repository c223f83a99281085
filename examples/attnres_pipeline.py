# SPDX-License-Identifier: Apache-2.0
"""Train a Block Attention Residuals transformer (arXiv:2603.15031) over a pipeline, every microbatch with its own T.

    torchrun --nproc-per-node 4 examples/attnres_pipeline.py --vpp 2
    torchrun --nproc-per-node 4 examples/attnres_pipeline.py --tp 2        # TP overlap inside two stages (CPU)
    python examples/attnres_pipeline.py --vpp 4                            # one rank, four chunks

The documents are source files of this Python's standard library, one token a byte, packed a few to a microbatch.
Two copies of the model learn side by side from the same microbatches: one sends every block again at every hop, the
other one keeps blocks on the rank. Their losses agree to rounding; the table at the end says what each of them sent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed works too

from packed.data import VOCABULARY, Packed, draw, lay_out, read_documents
from rich import box
from rich.console import Console
from rich.table import Table

import ub_dynamic as ub
from ub_dynamic.backends.host import all_reduce_sequence_parallel_gradients
from ub_dynamic.groups import Group, SoloGroup, TorchGroup
from ub_dynamic.packing import PackedBatch
from ub_dynamic.pipeline import PipelineRunner, PipelineTransport, StepResult
from ub_dynamic.ranks import discover
from ub_dynamic.testing.attnres import AttnResConfig, Linears, TokenBatch, chunks_of_rank
from ub_dynamic.testing.attnres_tp import HostLinears, mark_replicated
from ub_dynamic.testing.one_gpu import device


@dataclass
class Copy:
    """One of the two copies of the model: what of it is on this rank."""

    name: str
    runner: PipelineRunner
    chunks: nn.ModuleList
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def step(self, batches: Sequence[TokenBatch], everyone: Group) -> None:
        """Forward and backward of every microbatch over the pipeline, then the optimizer."""
        self.optimizer.zero_grad()
        result = self.runner.step(batches)
        if self.runner.transport.tp > 1:
            all_reduce_sequence_parallel_gradients(self.chunks)
        self.optimizer.step()
        self.results.append(result)
        # The last stage has the losses; under TP each rank has the share of its own rows.
        told = everyone.allgather([float(loss) for loss in result.losses], "the losses")
        self.losses.append(sum(map(sum, told)) / len(batches))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.world > 1:
        dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")
    linears = tensor_parallel(options) if options.tp > 1 else None
    config = AttnResConfig(
        options.sublayers,
        options.block,
        hidden=options.hidden,
        heads=options.heads,
        ffn=4 * options.hidden,
        vocab=VOCABULARY,
        dtype=torch.float32 if options.device == "cpu" else torch.bfloat16,
        device=options.device,
        query_scale=0.0,  # the paper's start: every block has the same weight
    )
    group = pipeline_group(options)
    copies = [make(name, config, group, linears, options) for name in ("plain", "cached")]
    everyone: Group = TorchGroup() if options.world > 1 else SoloGroup()
    console = Console(quiet=discover().rank != 0)
    available = read_documents(options.max_document)
    for step in range(options.steps):
        batches = microbatches(available, options, step)
        for copy in copies:
            copy.step(batches, everyone)
        tokens = [batch.total_tokens for batch in batches]
        losses = ", ".join(f"{copy.name} {copy.losses[-1]:.6f}" for copy in copies)
        console.print(f"step {step + 1:3}  T from {min(tokens):4} to {max(tokens):4}  loss {losses}", highlight=False)
    console.print(table(copies))
    finish(copies, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vpp", type=int, default=2, help="chunks of the model on a rank (default: 2)")
    parser.add_argument("--tp", type=int, default=1, help="ranks of a tensor-parallel group, CPU only (default: 1)")
    parser.add_argument("--sublayers", type=int, default=16, help="attention and MLP together (default: 16)")
    parser.add_argument("--block", type=int, default=4, help="sublayers of a block (default: 4)")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--documents", type=int, default=3, help="of a microbatch (default: 3)")
    parser.add_argument("--max-document", type=int, default=256, help="longest document in bytes (default: 256)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    options.world = discover().world_size
    if options.world % options.tp:
        parser.error(f"--tp {options.tp}: {options.world} ranks cannot be cut into such groups")
    if options.tp > 1 and options.device != "cpu":
        parser.error("--tp takes the host backend, so it needs --device cpu; for TE see examples/te_thd_training.py")
    if options.device == "cuda":
        options.device = device()
        torch.cuda.set_device(options.device)
    # The largest T that can occur; every communicator and every receive buffer is made for it, once.
    options.capacity = -(-options.documents * options.max_document // 64) * 64
    return options


def tensor_parallel(options: argparse.Namespace) -> Linears:
    """Overlapped TP layers on contiguous ranks, as TE has them."""
    shape = [options.capacity, options.hidden]
    ub.initialize_ub(shape, options.tp, dtype=torch.float32, backend="host", bootstrap_backend="gloo")
    return HostLinears()


def pipeline_group(options: argparse.Namespace) -> dist.ProcessGroup | None:
    """The ranks with the same place in their TP groups, in the order of their stages."""
    if options.tp == 1:
        return None
    groups = [dist.new_group(list(range(place, options.world, options.tp))) for place in range(options.tp)]
    return groups[dist.get_rank() % options.tp]


def make(
    name: str,
    config: AttnResConfig,
    group: dist.ProcessGroup | None,
    linears: Linears | None,
    options: argparse.Namespace,
) -> Copy:
    """The chunks of this rank, and what runs them. The cut is even; any other would do."""
    transport = PipelineTransport(
        group,
        capacity=(options.capacity, options.hidden),
        dtype=config.dtype,
        device=config.device,
        tp=options.tp,
    )
    stages = transport.size * options.vpp
    ends = [options.sublayers * stage // stages for stage in range(stages + 1)]
    sublayers = [after - before for before, after in pairwise(ends)]
    chunks = chunks_of_rank(config, sublayers, transport.rank, transport.size, linears)
    if options.tp > 1:
        mark_replicated(chunks)
    runner = PipelineRunner(
        chunks,
        transport,
        commits=[chunk.commits for chunk in chunks],
        cache=name == "cached",
        microbatch=ub.microbatch if options.tp > 1 else None,
    )
    modules = nn.ModuleList(chunks)
    return Copy(name, runner, modules, torch.optim.AdamW(modules.parameters(), lr=3e-3))


def microbatches(available: Sequence[bytes], options: argparse.Namespace, step: int) -> list[TokenBatch]:
    """The same real documents on every rank: T is known to each before anything is sent."""
    count = options.microbatches * options.documents
    documents = draw(available, count, seed=step)
    align = ub.token_multiple() if options.tp > 1 else 1
    batches = []
    for first in range(0, count, options.documents):
        mine = tuple(documents[first : first + options.documents])
        packed = PackedBatch.from_lengths([len(document) for document in mine], tp=options.tp, align=align)
        rows = lay_out(Packed(mine, packed))
        batches.append(TokenBatch(packed, rows.tokens.to(options.device), rows.targets.to(options.device)))
    return batches


def table(copies: Sequence[Copy]) -> Table:
    """What the two copies sent and held. Collective: every rank of the pipeline tells its part."""
    found = Table(title="One step of one pipeline", title_justify="left", box=box.SIMPLE_HEAD)
    found.add_column("")
    columns = []
    for copy in copies:
        found.add_column(copy.name, justify="right")
        transport, routes, last = copy.runner.transport, copy.runner.routes, copy.results[-1]
        told = transport.control.allgather((last.traffic, last.memory), "what was sent and held")
        blocks = sum(traffic.blocks["forward", 0] for traffic, _ in told)
        sent = sum(sum(traffic.tensor_bytes.values()) for traffic, _ in told)
        columns.append(
            [
                f"{transport.size} x {routes.vpp}",
                f"{blocks} ({routes.closed_form()})",
                f"{sent / 2**20:,.2f} MiB",
                f"{max(memory.store_peak_bytes for _, memory in told) / 2**20:,.2f} MiB",
                f"{max(memory.buffer_bytes for _, memory in told) / 2**20:,.2f} MiB",
                f"{copy.losses[0]:.4f} -> {copy.losses[-1]:.4f}",
            ]
        )
    names = (
        "ranks x chunks",
        "blocks sent a microbatch, each way (closed form)",
        "sent in all, hidden states and blocks",
        "block store of the fullest rank (peak)",
        "receive buffers of the fullest rank",
        "loss, first and last step",
    )
    for name, *values in zip(names, *columns, strict=True):
        found.add_row(name, *values)
    return found


def finish(copies: Sequence[Copy], options: argparse.Namespace) -> None:
    for copy in copies:
        copy.runner.transport.close()
    if options.tp > 1:
        ub.destroy_ub()
    if options.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

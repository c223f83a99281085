# SPDX-License-Identifier: Apache-2.0
"""Cases of the Block-AttnRes pipeline: how a model is cut, what it sends, how far it is from the model in one piece."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..pipeline import BlockRoutes, MemoryReport, PipelineRunner, PipelineTransport, StepResult
from ..pipeline.headers import Direction
from .attnres import AttnResChunk, AttnResConfig, TokenBatch, chunks_of_rank, cut, make_batch, whole_model

LENGTHS = ((5, 9), (2,), (17, 1, 3), (11,), (4, 4, 4, 4), (30,), (1, 1, 1), (8, 15))
"""Documents of eight microbatches, with eight different T."""


@dataclass(frozen=True)
class Case:
    """``sublayers[s]``: how many stage ``s`` of ``pp * vpp`` has; a block is ``block`` of them."""

    pp: int
    sublayers: tuple[int, ...]
    block: int
    lengths: tuple[tuple[int, ...], ...] = LENGTHS

    @property
    def vpp(self) -> int:
        return len(self.sublayers) // self.pp

    @property
    def tokens(self) -> list[int]:
        """T of every microbatch."""
        return [sum(documents) for documents in self.lengths]

    def config(self, **sizes: object) -> AttnResConfig:
        return AttnResConfig(sum(self.sublayers), self.block, **sizes)  # type: ignore[arg-type]

    def routes(self, cache: bool) -> BlockRoutes:
        return BlockRoutes.from_layers(cut(self.sublayers, len(self.sublayers)), self.block, self.pp, cache=cache)


# The two placements that the literature counts: blocks committed at chunks 0, 3, 7, 11 and at 0, 2, 4, 6.
P4V4 = Case(4, (2, *[1] * 14, 0), 4)
P4V2 = Case(4, (1,) * 8, 2)


def cases(pp: int, vpp: int) -> list[Case]:
    """Cuts with blocks that begin inside a chunk, at its first and at its last sublayer, and chunks without any."""
    stages = pp * vpp
    draw = random.Random(100 * pp + vpp)
    uneven = (*(draw.randint(0, 4) for _ in range(stages - 1)), 1)
    found = [Case(pp, (2,) * stages, 2), Case(pp, uneven, 3), Case(pp, (3, *uneven[1:]), 1 if stages <= 8 else 2)]
    found += [case for case in (P4V4, P4V2) if (case.pp, case.vpp) == (pp, vpp)]
    return found


def rank_runner(
    case: Case, config: AttnResConfig, transport: PipelineTransport, *, cache: bool, **options: object
) -> tuple[PipelineRunner, list[AttnResChunk]]:
    """This rank's runner of a case, and its chunks."""
    chunks = chunks_of_rank(config, case.sublayers, transport.rank, case.pp)
    commits = [chunk.commits for chunk in chunks]
    runner = PipelineRunner(chunks, transport, commits=commits, cache=cache, **options)  # type: ignore[arg-type]
    return runner, chunks


def rank_transport(case: Case, config: AttnResConfig, **options: object) -> PipelineTransport:
    """This rank's transport for the whole world, with room for the longest microbatch and a little more."""
    capacity = (max(case.tokens) + 3, config.hidden)
    return PipelineTransport(capacity=capacity, dtype=config.dtype, device=config.device, **options)  # type: ignore[arg-type]


def batches_of(case: Case, config: AttnResConfig) -> list[TokenBatch]:
    return [make_batch(lengths, config, seed) for seed, lengths in enumerate(case.lengths)]


def in_one_piece(config: AttnResConfig, batches: Sequence[TokenBatch]) -> tuple[AttnResChunk, list[torch.Tensor]]:
    """The unsplit model after forward and backward of every microbatch, and the losses.

    All ranks of the world call it; the first one computes, since every rank wants the same.
    """
    model = whole_model(config)
    precise = torch.promote_types(config.dtype, torch.float32)  # of the loss
    losses = [torch.zeros((), dtype=precise, device=config.device) for _ in batches]
    if not dist.is_initialized() or dist.get_rank() == 0:
        for index, batch in enumerate(batches):
            loss, _ = model(None, [], batch)
            loss.backward()
            losses[index] = loss.detach()
    grads = []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grads.append(parameter.grad)
    if dist.is_initialized():
        for tensor in (*losses, *grads):
            dist.broadcast(tensor, src=0)
    return model, losses


def gradients(
    case: Case,
    rank: int,
    chunks: Sequence[AttnResChunk],
    whole: AttnResChunk,
    share: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, grad: grad,
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, this rank's gradient, the unsplit model's) of every parameter that the rank holds and trains.

    ``share``: this rank's part of a gradient of the unsplit model, under tensor parallelism.
    """
    expected = {name: p.grad if p.grad is None else share(name, p.grad) for name, p in whole.named_parameters()}
    stages = cut(case.sublayers, len(case.sublayers))
    found = []
    for index, chunk in enumerate(chunks):
        numbers = stages[index * case.pp + rank]
        for name, parameter in chunk.named_parameters():
            if name.startswith("layers."):
                _, place, rest = name.split(".", 2)
                name = f"layers.{numbers[int(place)]}.{rest}"
            mine, theirs = parameter.grad, expected[name]
            assert (mine is None) == (theirs is None), f"{name}: {mine} against {theirs}"
            if mine is not None and theirs is not None:
                found.append((name, mine, theirs))
    return found


def largest_difference(pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> float:
    """The largest absolute difference of any element; NaN counts as infinite."""
    differences = [float((mine - theirs).abs().max()) for _, mine, theirs in pairs]
    return max((d if d == d else float("inf") for d in differences), default=0.0)


@dataclass(frozen=True)
class Outcome:
    """A step of a case on all ranks. Errors: the largest absolute one of any gradient and of any loss."""

    grad_error: float
    loss_error: float
    wire: Wire
    memory: list[MemoryReport]


def run_case(case: Case, config: AttnResConfig, *, cache: bool, **options: object) -> Outcome:
    """One step of a case, compared with the model in one piece; the same on every rank of the world."""
    batches = batches_of(case, config)
    whole, losses = in_one_piece(config, batches)
    transport = rank_transport(case, config, **options)
    runner, chunks = rank_runner(case, config, transport, cache=cache)
    result = runner.step(batches)
    grad_error = largest_difference(gradients(case, transport.rank, chunks, whole))
    loss_error = max((abs(float(a - b)) for a, b in zip(result.losses, losses, strict=False)), default=0.0)
    told = transport.control.allgather((grad_error, loss_error, result.memory), "comparing with the unsplit model")
    wire = on_the_wire(transport, result)
    transport.close()
    return Outcome(max(t[0] for t in told), max(t[1] for t in told), wire, [t[2] for t in told])


@dataclass(frozen=True)
class Wire:
    """What all ranks together have sent, by (direction, microbatch)."""

    blocks: Counter[tuple[Direction, int]]
    tensor_bytes: Counter[tuple[Direction, int]]


def on_the_wire(transport: PipelineTransport, result: StepResult) -> Wire:
    """The traffic of all ranks, on every rank."""
    told = transport.control.allgather((result.traffic.blocks, result.traffic.tensor_bytes), "counting traffic")
    blocks: Counter[tuple[Direction, int]] = Counter()
    tensor_bytes: Counter[tuple[Direction, int]] = Counter()
    for theirs, their_bytes in told:
        blocks.update(theirs)
        tensor_bytes.update(their_bytes)
    return Wire(blocks, tensor_bytes)

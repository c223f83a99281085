# SPDX-License-Identifier: Apache-2.0
"""Chunks of a pipeline may be any function: one that learns T with the first message, or returns what came in."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ub_dynamic.pipeline import PipelineRunner, PipelineTransport

pytestmark = pytest.mark.usefixtures("gloo_world")


@pytest.mark.mpi(4, launcher="torchrun")
def test_tokens_can_come_with_the_header(mpi_size: int) -> None:
    """Ranks without the batches learn T from the first message of each microbatch."""
    tokens = [5, 2, 9, 1, 9, 3]
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(2 * mpi_size)]
    reference = [copy.deepcopy(layer) for layer in layers]
    inputs = [torch.randn(count, 8, dtype=torch.float64) for count in tokens]
    contexts = []

    def chunk(stage: int):
        def run(hidden, blocks, batch):
            x = torch.tanh(layers[stage](inputs[batch.index] if stage == 0 else hidden))
            return (x.pow(2).mean() if stage == 2 * mpi_size - 1 else x), ()

        return run

    def microbatch(batch):
        contexts.append(getattr(batch, "total_tokens", batch))
        return nullcontext()

    transport = PipelineTransport(capacity=(9, 8), dtype=torch.float64, timeout_s=60, poison=True)
    rank = transport.rank
    runner = PipelineRunner([chunk(rank), chunk(rank + mpi_size)], transport, microbatch=microbatch)
    batches = [SimpleNamespace(index=index, total_tokens=count) for index, count in enumerate(tokens)]
    runner.step(batches if rank == 0 else [None] * len(tokens))
    for x in inputs:
        for layer in reference:
            x = torch.tanh(layer(x))
        x.pow(2).mean().backward()
    for stage in (rank, rank + mpi_size):
        assert torch.equal(layers[stage].weight.grad, reference[stage].weight.grad)
    once = set(tokens) if rank == 0 else set()  # before the step, to see whether T is accepted
    assert Counter(contexts) == Counter([*(4 * tokens), *once])  # two chunks, forward and backward
    transport.close()


@pytest.mark.mpi(1, 2, launcher="torchrun")
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_chunks_that_return_views_of_what_came_in(mpi_size: int, cached: bool) -> None:
    """Outputs, commits and gradients that lie in receive buffers: none is given back while someone reads it."""
    tokens = [5, 2, 9, 1, 7, 3]
    start = [torch.linspace(-1, 1, 4 * count, dtype=torch.float64).view(count, 4) for count in tokens]
    weights = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)

    def stages(weights):
        return [
            lambda hidden, blocks, batch: ((start[batch.index] * weights[0]).t().contiguous().t(), []),
            lambda hidden, blocks, batch: (hidden.view(hidden.shape), [hidden.view_as(hidden)]),
            lambda hidden, blocks, batch: (hidden.flip(0), [blocks[0][:]]),
            lambda hidden, blocks, batch: ((hidden * blocks[0] * blocks[1].sin() * weights[1]).sum(), []),
        ]

    batches = [SimpleNamespace(index=index, total_tokens=count) for index, count in enumerate(tokens)]
    reference = weights.detach().clone().requires_grad_()
    losses = []
    for batch in batches:
        hidden, blocks = None, []
        for stage in stages(reference):
            hidden, committed = stage(hidden, blocks, batch)
            blocks = [*blocks, *committed]
        hidden.backward()
        losses.append(hidden.detach())
    transport = PipelineTransport(capacity=(9, 4), dtype=torch.float64, timeout_s=60, poison=True)
    mine = range(transport.rank, 4, mpi_size)
    commits = [[0, 1, 1, 0][stage] for stage in mine]
    runner = PipelineRunner([stages(weights)[stage] for stage in mine], transport, commits=commits, cache=cached)
    for result in (runner.step(batches), runner.evaluate(batches)):
        assert result.memory.buffers_leased == 0
        if transport.rank == mpi_size - 1:
            torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses), rtol=0, atol=1e-12)
    total = sum(transport.control.allgather(weights.grad, "the gradients"))
    torch.testing.assert_close(total, reference.grad, rtol=0, atol=1e-12)
    transport.close()

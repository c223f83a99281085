# SPDX-License-Identifier: Apache-2.0
"""One training run in one mode through megatron-core's own schedules, and what it records of each step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from packed.data import Packed

from ub_dynamic.integrations import megatron
from ub_dynamic.integrations.megatron import Microbatch

from .model import Trained
from .settings import Mode
from .work import Work, bucketed, padded, to_megatron

_WARMUP_STEPS = 4


@dataclass(frozen=True)
class Step:
    """``loss``: nats a byte over all ranks; ``seconds``: of the slowest rank, forward to optimizer."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    real_tokens: int
    tokens: int


class Run:
    """Model, optimizer and records of one mode. Every rank calls the same methods in the same order."""

    def __init__(self, mode: Mode, settings: argparse.Namespace, work: Work) -> None:
        self.mode: Mode = mode
        self.settings, self.work = settings, work
        self.trained = Trained(settings, overlap=mode != "none")
        self.steps: list[Step] = []
        self.graphs: megatron.GraphedDecoder | None = None
        if mode == "dynamic" and settings.bucket is not None:
            in_flight = settings.microbatches * (settings.vpp or 1) if settings.pp > 1 else 1
            shapes = -(-work.capacity // settings.bucket)
            self.graphs = megatron.graph_decoder(
                self.trained.chunks, bucket=settings.bucket, max_graphs=shapes, in_flight=in_flight
            )

    @property
    def records(self) -> list[Step]:
        return self.steps

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    def warm_up(self, steps: int = 1) -> None:
        """Forward and backward of the first steps without an update, so that first-use costs are nobody's."""
        for microbatches in self.work.steps[:steps]:
            self._forward_backward(microbatches)
        self.trained.zero_gradients()

    def step(self, microbatches: Sequence[Packed]) -> None:
        """One optimizer step."""
        number = len(self.steps)
        rows = [self._lay_out(packed) for packed in microbatches]
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.trained.zero_gradients()
        loss, count = self._forward_backward(microbatches, rows)
        norm = self.trained.step(self.settings.lr * min(1.0, (number + 1) / _WARMUP_STEPS))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        loss, seconds = _over_all_ranks(loss, count, seconds)
        real = sum(packed.batch.real_tokens for packed in microbatches)
        tokens = sum(each.batch.total_tokens for each in rows)
        self.steps.append(Step(number, loss, norm, seconds, real, tokens))

    def close(self) -> None:
        """Free what must not outlive the communicators."""
        if self.graphs is not None:
            self.graphs.remove()

    def rows(self) -> list[dict[str, Any]]:
        """One row a step."""
        return [{"mode": self.mode, **asdict(step)} for step in self.steps]

    def _lay_out(self, packed: Packed) -> Microbatch:
        if self.mode == "pad":
            packed = padded(packed, self.work.capacity)
        elif self.graphs is not None:
            packed = bucketed(packed, self.work.capacity, self.settings.bucket)
        return to_megatron(packed, torch.device("cuda"))

    def _forward_backward(
        self, microbatches: Sequence[Packed], rows: Sequence[Microbatch] | None = None
    ) -> tuple[float, int]:
        """The summed loss and the number of labels, both 0 except on the last stage."""
        rows = [self._lay_out(packed) for packed in microbatches] if rows is None else rows
        chunks = self.trained.chunks
        store = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(rows) for _ in chunks] if len(chunks) > 1 else iter(rows),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(rows),
            seq_length=self.work.capacity,
            micro_batch_size=1,
            forward_only=False,
        )
        return sum(float(each["loss"]) for each in store), sum(int(each["labels"]) for each in store)


def take_turns(runs: Sequence[Run], work: Work, on_step: Callable[[Run], None], warm: int = 1) -> None:
    """Every mode over the same microbatches, step by step in turns, so that a busy machine is fair to all.

    ``warm``: steps that are gone through once before; libraries plan for each new T.
    """
    for run in runs:
        run.warm_up(warm)
    for number, microbatches in enumerate(work.steps):
        for run in runs if number % 2 == 0 else reversed(runs):
            run.step(microbatches)
            on_step(run)


def _forward_step(data: Iterator[Microbatch], model: Any) -> Any:
    microbatch = next(data)
    output = model(**microbatch.forward_arguments())

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = microbatch.masked_sum(losses)
        labels = microbatch.loss_mask.sum().to(torch.int)
        return total, labels, {"loss": total.detach().clone(), "labels": labels.clone()}

    return output, loss_function


def _over_all_ranks(loss: float, count: int, seconds: float) -> tuple[float, float]:
    """The mean loss a label over all data-parallel ranks, known on the last stage only, and the slowest rank's time."""
    sums = torch.tensor([loss, count], dtype=torch.float64, device="cuda")
    dist.all_reduce(sums)  # the TP ranks of the last stage hold the same, which cancels out
    slowest = torch.tensor(seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(sums[0] / sums[1]), float(slowest)


def data_parallel() -> tuple[int, int]:
    """Size and rank."""
    return parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

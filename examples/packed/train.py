# SPDX-License-Identifier: Apache-2.0
"""One training run in one mode: what the token count of a microbatch costs under each way to handle it.

``dynamic``: buffers registered once at capacity, the active shape follows each microbatch.
``pad``: every microbatch is padded to capacity; padding is left out of attention and loss.
``rebuild``: buffers are destroyed and registered again at exactly T for each microbatch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import ub_dynamic as ub
from ub_dynamic.backends.host import all_reduce_sequence_parallel_gradients, trace
from ub_dynamic.backends.host.buffers import allocation_count
from ub_dynamic.groups import Group

from .data import Packed, Rows, lay_out
from .model import ModelConfig, PackedTransformer
from .ranks import total
from .settings import Mode


@dataclass(frozen=True)
class TrainConfig:
    """``in_flight``: forwards that run before the first backward, as a pipeline's 1F1B schedule has them."""

    learning_rate: float = 3e-3
    warmup_steps: int = 4
    in_flight: int = 2


@dataclass(frozen=True)
class MicrobatchRecord:
    """A microbatch with ``real_tokens`` of documents that ran with T = ``tokens``, and the ``seconds`` of its
    forward and backward, in mode rebuild with the registration."""

    step: int
    real_tokens: int
    tokens: int
    seconds: float


class Buffers:
    """Registers the buffers of all communicators: once at capacity, or again and again at one exact T."""

    def __init__(self, register: Callable[[int], None], capacity: int) -> None:
        self._register = register
        self.capacity = capacity

    def at(self, tokens: int) -> None:
        """Buffers for ``tokens``: nothing to do if they are registered for that."""
        if ub.is_ub_initialized() and ub.get_ub_capacity_shape()[0] == tokens:
            return
        ub.destroy_ub()
        self._register(tokens)


class Run:
    """The model, optimizer and records of one mode. Every rank calls the same methods in the same order."""

    def __init__(self, mode: Mode, model: ModelConfig, config: TrainConfig, buffers: Buffers, group: Group) -> None:
        self.mode: Mode = mode
        self.config = config
        # Registration per microbatch cannot keep the buffers of several microbatches alive.
        self.in_flight = 1 if mode == "rebuild" else config.in_flight
        self.buffers, self.group = buffers, group
        self.model = PackedTransformer(model, group.rank, group.size)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.records: list[MicrobatchRecord] = []
        self.losses: list[float] = []
        self.spans: list[trace.Span] = []
        self.shape_changes = self.allocations = 0
        self.seconds = 0.0

    def step(self, microbatches: Sequence[Packed]) -> None:
        """One optimizer step over a few microbatches; ``losses`` gets the mean loss a token of all ranks."""
        begin, allocated, tracer = time.perf_counter(), allocation_count(), trace.start()
        rows = [self._rows(packed) for packed in microbatches]
        targets = sum(item.batch.real_tokens for item in rows)
        number = len(self.losses)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.config.learning_rate * min(1.0, (number + 1) / self.config.warmup_steps)
        if self.mode != "rebuild":
            ub.reset_ub_active_shape()  # whatever another run left
        loss = self._accumulate(rows, targets, number)
        all_reduce_sequence_parallel_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(total(self.group, loss, "summing the loss"))
        trace.stop()
        self.spans += tracer.spans
        self.allocations += allocation_count() - allocated
        self.seconds += time.perf_counter() - begin

    def warm_up(self, largest: Packed) -> None:
        """A forward and a backward that leave no trace, so that first-touch costs are nobody's."""
        self._accumulate([self._rows(largest)], 1, 0)
        self.optimizer.zero_grad()
        self.records.clear()
        self.shape_changes = 0

    def hidden_fraction(self) -> float:
        """The part of this rank's transfer time in which a GEMM ran."""
        return trace.hidden_fraction(self.spans)

    def save_trace(self, path: Path) -> None:
        """Every rank's GEMMs and transfers, for chrome://tracing or ui.perfetto.dev. Collective."""
        tracer = trace.Tracer()
        tracer.spans = self.spans
        trace.gather_and_save(path, tracer, self.group)

    def _accumulate(self, rows: Sequence[Rows], targets: int, step: int) -> float:
        """Forward and backward of every microbatch; this rank's part of the mean loss."""
        waiting: deque[tuple[int, torch.Tensor]] = deque()
        seconds = [0.0] * len(rows)
        total = torch.zeros((), dtype=torch.float64)
        for index, item in enumerate(rows):
            begin = time.perf_counter()
            loss = self._forward(item) / targets
            seconds[index] += time.perf_counter() - begin
            total += loss.detach()
            waiting.append((index, loss))
            if len(waiting) == self.in_flight:
                self._backward(waiting, seconds)
        while waiting:
            self._backward(waiting, seconds)
        self.records += [
            MicrobatchRecord(step, item.batch.real_tokens, item.batch.total_tokens, spent)
            for item, spent in zip(rows, seconds, strict=True)
        ]
        return float(total)

    def _rows(self, packed: Packed) -> Rows:
        return lay_out(packed.padded_to(self.buffers.capacity) if self.mode == "pad" else packed)

    def _forward(self, rows: Rows) -> torch.Tensor:
        self.buffers.at(rows.batch.total_tokens if self.mode == "rebuild" else self.buffers.capacity)
        self._active = ub.get_ub_active_shape()[0]
        with ub.microbatch(rows.batch) as microbatch:
            self._count_change()
            loss = microbatch.bind_backward(self.model(rows))
        self._count_change()
        return loss

    def _backward(self, waiting: deque[tuple[int, torch.Tensor]], seconds: list[float]) -> None:
        index, loss = waiting.popleft()
        begin = time.perf_counter()
        loss.backward()
        seconds[index] += time.perf_counter() - begin
        self._count_change()

    def _count_change(self) -> None:
        tokens = ub.get_ub_active_shape()[0]
        self.shape_changes += tokens != self._active
        self._active = tokens

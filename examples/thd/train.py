# SPDX-License-Identifier: Apache-2.0
"""One training run in one mode on TE's communicators; modes and records are those of the CPU example.

The seconds of a microbatch are the device's, from its first to its last kernel, forward and backward
together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from packed.data import Packed, lay_out
from packed.job import Work
from packed.settings import Mode
from packed.train import Buffers, MicrobatchRecord

import ub_dynamic as ub
from ub_dynamic.groups import Group

from .model import LocalRows, ModelConfig, THDTransformer, to_device

COMMUNICATORS = 12  # of TE, registered by each initialize_ub


@dataclass(frozen=True)
class Place:
    """Where a rank runs: ``group`` for small host values, ``tp_group`` (NCCL) for TE."""

    group: Group
    tp_group: Any
    device: torch.device


@dataclass
class _Timed:
    """Device events around the forward and the backward of a microbatch."""

    rows: LocalRows
    events: list[torch.cuda.Event] = field(default_factory=list)
    seconds: float = 0.0

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def finish(self) -> None:
        pairs = zip(self.events[::2], self.events[1::2], strict=True)
        self.seconds += sum(begin.elapsed_time(end) for begin, end in pairs) / 1000


class Run:
    """The model, optimizer and records of one mode. Every rank calls the same methods in the same order."""

    def __init__(
        self, mode: Mode, config: ModelConfig, lr: float, in_flight: int, buffers: Buffers, place: Place
    ) -> None:
        self.mode: Mode = mode
        # Registration per microbatch cannot keep the buffers of several microbatches alive.
        self.in_flight = 1 if mode == "rebuild" else in_flight
        self.buffers, self.place, self.lr = buffers, place, lr
        self.model = THDTransformer(config, place.tp_group, place.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.records: list[MicrobatchRecord] = []
        self.losses: list[float] = []
        self.shape_changes = self.allocations = 0
        self.seconds = 0.0

    def warm_up(self, largest: Packed) -> None:
        """A forward and a backward that leave no trace, so that first-use costs are nobody's."""
        self._accumulate([self._rows(largest)], 1)
        self.optimizer.zero_grad()
        self.shape_changes = self.allocations = 0

    def step(self, microbatches: Sequence[Packed]) -> None:
        """One optimizer step over a few microbatches; ``losses`` gets the mean loss a token of all ranks."""
        begin = time.perf_counter()
        rows = [self._rows(packed) for packed in microbatches]
        targets = sum(item.batch.real_tokens for item in rows)
        number = len(self.losses)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.lr * min(1.0, (number + 1) / 4)
        loss, timed = self._accumulate(rows, targets)
        self.model.all_reduce_sequence_parallel_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(sum(self.place.group.allgather(float(loss), "summing the loss")))
        for each in timed:  # the losses have waited for the device already
            each.finish()
            batch = each.rows.batch
            self.records.append(MicrobatchRecord(number, batch.real_tokens, batch.total_tokens, each.seconds))
        self.seconds += time.perf_counter() - begin

    def _accumulate(self, rows: Sequence[LocalRows], targets: int) -> tuple[torch.Tensor, list[_Timed]]:
        """Forward and backward of every microbatch; this rank's part of the mean loss, on the device."""
        waiting: deque[tuple[_Timed, torch.Tensor]] = deque()
        timed = [_Timed(item) for item in rows]
        total = torch.zeros((), device=self.place.device)
        for each in timed:
            loss = self._forward(each) / targets
            total += loss.detach()
            waiting.append((each, loss))
            if len(waiting) == self.in_flight:
                self._backward(*waiting.popleft())
        while waiting:
            self._backward(*waiting.popleft())
        return total, timed

    def _forward(self, each: _Timed) -> torch.Tensor:
        if self.mode == "rebuild":
            each.seconds += self._rebuild(each.rows.batch.total_tokens)
        else:
            self.buffers.at(self.buffers.capacity)
        before = ub.get_ub_active_shape()
        each.mark()
        with ub.microbatch(each.rows.batch) as microbatch:
            self.shape_changes += ub.get_ub_active_shape() != before
            loss = microbatch.bind_backward(self.model(each.rows))
        self.shape_changes += ub.get_ub_active_shape() != microbatch.shape
        each.mark()
        return loss

    def _backward(self, each: _Timed, loss: torch.Tensor) -> None:
        before = ub.get_ub_active_shape()
        each.mark()
        loss.backward()
        each.mark()
        self.shape_changes += ub.get_ub_active_shape() != before

    def _rebuild(self, tokens: int) -> float:
        """Host seconds of registering every buffer again for ``tokens``."""
        if ub.get_ub_capacity_shape()[0] == tokens:
            return 0.0
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.buffers.at(tokens)
        self.allocations += COMMUNICATORS
        return time.perf_counter() - begin

    def _rows(self, packed: Packed) -> LocalRows:
        layout = lay_out(packed.padded_to(self.buffers.capacity) if self.mode == "pad" else packed)
        group = self.place.group
        return to_device(layout, group.rank, group.size, self.place.device)


def take_turns(runs: Sequence[Run], work: Work, on_step: Callable[[Run], None]) -> None:
    """Every step in each run before the next step, in changing order: a drifting clock is fair to all."""
    for run in runs:
        run.warm_up(work.largest)
    for number, microbatches in enumerate(work.steps):
        for run in runs if number % 2 == 0 else reversed(runs):
            ub.reset_ub_active_shape()  # whatever another run left
            run.step(microbatches)
            on_step(run)

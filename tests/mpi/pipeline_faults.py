# SPDX-License-Identifier: Apache-2.0
"""Steps of a pipeline whose transport loses or swaps a message: what each rank saw, and what is left after it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from ub_dynamic.errors import (
    UBStateError,
)
from ub_dynamic.pipeline import PipelineRunner, PipelineTransport
from ub_dynamic.pipeline.headers import Header
from ub_dynamic.testing.pipeline_cases import (
    Case,
    batches_of,
    gradients,
    in_one_piece,
    largest_difference,
    rank_runner,
)

LIMIT_S = 30.0
PATIENT_S, SHORT_S = 20.0, 3.0  # a wait that does not have to end, and one that a test waits for
LENGTHS = ((5,), (3, 1), (8,), (2, 4), (7,), (1, 2))
FLAT = Case(2, (3, 3), 2, LENGTHS)  # 1F1B
FOLDED = Case(2, (2, 1, 2, 1), 2, LENGTHS)  # interleaved


@dataclass(frozen=True)
class Fault:
    """What ``rank`` does with its message number ``index`` in a direction: drop it, or send it after the next one."""

    rank: int
    direction: str
    index: int
    kind: str


class Faulty(PipelineTransport):
    """A transport whose rank loses or swaps one message."""

    fault: Fault | None = None

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self._seen, self._held = 0, None

    def send(self, header: Header, tensors, leases=(), limit=None) -> None:
        fault = self.fault
        if fault is None or (fault.rank, fault.direction) != (self.rank, header.direction):
            super().send(header, tensors, leases, limit)
            return
        index, self._seen = self._seen, self._seen + 1
        if index == fault.index and fault.kind == "drop":
            return
        if index == fault.index:
            self._held = header, tensors, leases, limit
            return
        super().send(header, tensors, leases, limit)
        if self._held is not None:
            super().send(*self._held)
            self._held = None


def attempt(runner: PipelineRunner, batches) -> tuple[BaseException | None, float]:
    """The error of a step on this rank, and how long it took."""
    start = time.monotonic()
    try:
        runner.step(batches)
    except BaseException as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def told(value):
    """The value of every rank, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def make(case: Case, kind=PipelineTransport, wait_s=PATIENT_S):
    config = case.config(hidden=8, heads=2, ffn=8)
    capacity = (max(case.tokens), config.hidden)
    transport = kind(capacity=capacity, dtype=config.dtype, timeout_s=wait_s, poison=True)
    runner, chunks = rank_runner(case, config, transport, cache=True)
    return config, transport, runner, chunks


def check_ended(transport: PipelineTransport, runner: PipelineRunner, error: BaseException | None, batches) -> None:
    """The store is clean, and a transport that has failed says so."""
    assert runner.store.empty
    assert runner.store.live_bytes == 0
    assert not any(stage._records for stage in runner.stages)
    if error is not None:
        with pytest.raises(UBStateError, match="make a new one on every rank"):
            runner.step(batches)
    dist.barrier()  # whoever still waits does so with its neighbours there
    transport.close()


def check_works_again(case: Case) -> None:
    """A new transport takes up where the failed one was given up."""
    config, transport, runner, chunks = make(case)
    batches = batches_of(case, config)
    whole, _ = in_one_piece(config, batches)
    runner.step(batches)
    assert largest_difference(gradients(case, transport.rank, chunks, whole)) <= 1e-12
    transport.close()

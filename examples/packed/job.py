# SPDX-License-Identifier: Apache-2.0
"""The whole job on one rank: documents to microbatches, buffers at the largest T, every mode on them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import ub_dynamic as ub
from ub_dynamic.groups import Group
from ub_dynamic.planning import Plan, plan_fixed_count, plan_microbatches
from ub_dynamic.ranks import Launch

from .data import Packed, draw, pack, read_documents
from .model import ModelConfig
from .ranks import handle
from .settings import UsageError, chosen_modes
from .train import Buffers, Run, TrainConfig

OnStep = Callable[[Run], None]


@dataclass(frozen=True)
class Work:
    """``steps``: the microbatches of each optimizer step. ``capacity``: the largest T that occurs."""

    steps: tuple[tuple[Packed, ...], ...]
    capacity: int
    largest: Packed


def prepare(settings: argparse.Namespace, tp: int) -> Work:
    """The same microbatches on every rank; :class:`UsageError` if there are too few documents for them."""
    available = read_documents(settings.max_document)
    count = settings.steps * settings.accumulate * settings.documents
    if count > len(available):
        raise UsageError(
            f"--steps * --accumulate * --documents = {count} documents, but the standard library has "
            f"{len(available)} with --max-document {settings.max_document}"
        )
    documents = draw(available, count, settings.seed)
    microbatches = pack(documents, _plan(settings, documents, tp))
    largest = max(microbatches, key=lambda packed: packed.batch.total_tokens)
    size = settings.accumulate
    steps = tuple(tuple(microbatches[i : i + size]) for i in range(0, len(microbatches), size))
    return Work(steps, largest.batch.total_tokens, largest)


def _plan(settings: argparse.Namespace, documents: Sequence[bytes], tp: int) -> Plan:
    lengths = [len(document) for document in documents]
    if settings.plan == "fixed":
        return plan_fixed_count(lengths, settings.documents, tp=tp)
    return plan_microbatches(lengths, settings.max_tokens, tp=tp)


def train(settings: argparse.Namespace, work: Work, group: Group, on_step: OnStep) -> list[Run]:
    """Run every chosen mode over the same microbatches. Collective.

    dynamic and pad share the buffers and take turns step by step, so that a busy machine is fair to both.
    rebuild destroys the buffers and comes last.
    """
    model = ModelConfig(settings.hidden, settings.layers, settings.heads, getattr(torch, settings.dtype), settings.seed)
    config = TrainConfig(learning_rate=settings.lr, in_flight=settings.in_flight)

    def register(tokens: int) -> None:
        ub.initialize_ub(
            [tokens, settings.hidden], group.size, dtype=model.dtype, backend="host", tp_group=handle(group)
        )

    buffers = Buffers(register, work.capacity)
    buffers.at(work.capacity)
    runs = [Run(mode, model, config, buffers, group) for mode in chosen_modes(settings)]
    _take_turns([run for run in runs if run.mode != "rebuild"], work, on_step)
    _take_turns([run for run in runs if run.mode == "rebuild"], work, on_step)
    ub.destroy_ub()
    return runs


def _take_turns(runs: list[Run], work: Work, on_step: OnStep) -> None:
    for run in runs:
        run.warm_up(work.largest)
    for number, microbatches in enumerate(work.steps):
        for run in runs if number % 2 == 0 else reversed(runs):
            run.step(microbatches)
            on_step(run)


def use_own_cores(launch: Launch) -> None:
    """Divide the cores among the ranks, unless OMP_NUM_THREADS is set: threads that share one are slow."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.world_size))

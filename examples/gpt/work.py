# SPDX-License-Identifier: Apache-2.0
"""The standard library's documents as Megatron's packed microbatches, the same on every rank."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from packed.data import BEGIN, Packed, draw, pack, read_documents
from packed.settings import UsageError

from ub_dynamic.integrations.megatron import Microbatch
from ub_dynamic.packing import PackedBatch
from ub_dynamic.planning import plan_fixed_count


@dataclass(frozen=True)
class Work:
    """``steps``: the microbatches of each optimizer step. ``capacity``: the largest T that occurs."""

    steps: tuple[tuple[Packed, ...], ...]
    capacity: int

    @property
    def token_ratio(self) -> float:
        """All T together over what padding each to the capacity makes."""
        tokens = [packed.batch.total_tokens for step in self.steps for packed in step]
        return sum(tokens) / (len(tokens) * self.capacity)


def prepare(settings: argparse.Namespace, dp: int = 1, dp_rank: int = 0) -> Work:
    """This data-parallel rank's microbatches; :class:`UsageError` if there are too few documents for all."""
    available = read_documents(settings.max_document)
    count = settings.steps * settings.microbatches * settings.documents * dp
    if count > len(available):
        raise UsageError(
            f"--steps * --microbatches * --documents * {dp} = {count} documents, but the standard library has "
            f"{len(available)} with --max-document {settings.max_document}"
        )
    documents = draw(available, count, settings.seed)
    # H is a multiple of 32, so the communicators take every multiple of tp.
    plan = plan_fixed_count([len(document) for document in documents], settings.documents, tp=settings.tp)
    everything = pack(documents, plan)
    capacity = max(packed.batch.total_tokens for packed in everything)
    if settings.bucket is not None:
        capacity = -(-capacity // settings.bucket) * settings.bucket
    mine = everything[dp_rank::dp]
    size = settings.microbatches
    return Work(tuple(tuple(mine[at : at + size]) for at in range(0, len(mine), size)), capacity)


def padded(packed: Packed, capacity: int) -> Packed:
    """The same documents with T = ``capacity``."""
    return packed.padded_to(capacity)


def bucketed(packed: Packed, capacity: int, bucket: int) -> Packed:
    """The same documents in a layout that shares its CUDA graph with others: T, slots and ``max_seqlen`` in common."""
    lengths = [len(document) for document in packed.documents]
    batch = PackedBatch.from_lengths(
        lengths,
        tp=packed.batch.tp,
        capacity=capacity,
        bucket=bucket,
        slots=len(lengths),
        max_seqlen=capacity,
        tail="extend_last",
    )
    return Packed(packed.documents, batch)


def to_megatron(packed: Packed, device: torch.device) -> Microbatch:
    """Tokens that begin each document with ``BEGIN``, so that every byte is a label."""
    texts: Sequence[torch.Tensor] = [
        torch.frombuffer(bytearray(document), dtype=torch.uint8).long() for document in packed.documents
    ]
    begin = torch.tensor([BEGIN])
    tokens = [torch.cat([begin, text[:-1]]) for text in texts]
    return Microbatch.pack(packed.batch, tokens, texts, device, fill=BEGIN)

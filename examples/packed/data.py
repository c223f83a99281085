# SPDX-License-Identifier: Apache-2.0
"""Real documents of very different lengths, and the packed microbatches that they make.

Documents are the source files of the running Python's standard library, one token a byte. A file longer than
``max_document`` bytes is split into its top-level functions and classes, one document each (what precedes the
first is one too); a piece that is still longer is cropped. Tests, installed packages and documents under
``MIN_DOCUMENT`` bytes are left out. Paths are sorted, so every rank of one machine reads the same.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ub_dynamic.packing import PackedBatch
from ub_dynamic.planning import Plan

BEGIN = 256  # the token before the first byte, so that every byte of a document is a target
VOCABULARY = 257
IGNORED = -100  # the target of rows that hold no document: cross_entropy's default ignore_index
MIN_DOCUMENT = 32

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_DEFINITION = re.compile(rb"^(?:@|(?:async )?def |class )", re.MULTILINE)


def read_documents(max_document: int, root: Path | None = None) -> list[bytes]:
    """Every document under ``root`` (the standard library), in the order of the sorted paths."""
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    documents: list[bytes] = []
    for path in sorted(folder.rglob("*.py")):
        if not _LEFT_OUT.intersection(path.relative_to(folder).parts):
            documents += split_source(path.read_bytes(), max_document)
    return documents


def split_source(source: bytes, max_document: int) -> list[bytes]:
    """One document if it fits, else its top-level definitions, each cropped to ``max_document`` bytes."""
    pieces = [source] if len(source) <= max_document else _definitions(source)
    return [piece[:max_document] for piece in pieces if len(piece) >= MIN_DOCUMENT]


def _definitions(source: bytes) -> Iterator[bytes]:
    start, decorated = 0, False
    for match in _DEFINITION.finditer(source):
        if not decorated:  # a decorator begins the definition that follows it
            yield source[start : match.start()]
            start = match.start()
        decorated = match.group() == b"@"
    yield source[start:]


def draw(documents: Sequence[bytes], count: int, seed: int) -> list[bytes]:
    """``count`` documents without repetition, the same on every rank; ValueError if there are fewer."""
    if count > len(documents):
        raise ValueError(f"{count} documents are wanted, but there are only {len(documents)}")
    return random.Random(seed).sample(documents, count)


@dataclass(frozen=True)
class Packed:
    """The documents of one microbatch and their layout."""

    documents: tuple[bytes, ...]
    batch: PackedBatch

    def padded_to(self, tokens: int) -> Packed:
        """The same documents with T = ``tokens``, as a job has them whose buffers know one shape only."""
        lengths, tp = [len(document) for document in self.documents], self.batch.tp
        return Packed(self.documents, PackedBatch.from_lengths(lengths, tp=tp, capacity=tokens, bucket=tokens))


def pack(documents: Sequence[bytes], plan: Plan) -> list[Packed]:
    """Every microbatch of the plan."""
    return [
        Packed(tuple(documents[span.document][span.start : span.stop] for span in each.spans), each.batch)
        for each in plan
    ]


@dataclass(frozen=True)
class Rows:
    """The rows of one packed microbatch, for all TP ranks: every tensor is ``[T]``, int64."""

    batch: PackedBatch
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor


def lay_out(packed: Packed) -> Rows:
    """The rows of one microbatch; padding rows get the target ``IGNORED``."""
    batch = packed.batch
    texts = [torch.frombuffer(bytearray(document), dtype=torch.uint8).long() for document in packed.documents]
    begin = torch.tensor([BEGIN])
    return Rows(
        batch,
        tokens=batch.pack([torch.cat([begin, text[:-1]]) for text in texts], fill=BEGIN),
        targets=batch.pack(texts, fill=IGNORED),
        positions=torch.cat([torch.arange(length) for length in batch.padded]),
    )

# SPDX-License-Identifier: Apache-2.0
"""The header of every message between stages: what follows it, in 64 int64, made anew for every hop.

A header is never remembered: the receiver compares each one with what its own tables say comes next, so a lost
or swapped message, another T, block count or dtype is an error that names both ranks and both values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import errors
from ..errors import UBDynamicError, UBRankMismatchError, UBStateError, UBUnsupportedError

Direction = Literal["forward", "backward"]

MAGIC = 0x7562_6479_6E01  # "ubdyn", version 1 of this header
WORDS = 64
_FIELDS = 12
_NOTE_BYTES = 8 * (WORDS - _FIELDS)
_KINDS: tuple[str, ...] = ("forward", "backward", "abort")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Header:
    """What a message is.

    ``stage``: the stage that it is for. ``tokens``: T of the microbatch; None where the receiver does not know it
    yet. ``blocks``: tensors behind the hidden state (or its gradient). ``consumed``: how many messages of the
    opposite direction the sender has had from the receiver so far, which tells that those sends are complete.
    """

    direction: Direction
    step: int
    microbatches: int
    stage: int
    microbatch: int
    tokens: int | None
    blocks: int
    dtype: torch.dtype
    width: int
    consumed: int = 0

    def __str__(self) -> str:
        return f"{self.direction} of microbatch {self.microbatch} to stage {self.stage}"

    def pack(self) -> torch.Tensor:
        """As an int64 tensor of ``WORDS``, on the host."""
        assert self.tokens is not None
        words = torch.zeros(WORDS, dtype=torch.int64)
        words[:_FIELDS] = torch.tensor(
            [
                MAGIC,
                _KINDS.index(self.direction),
                self.step,
                self.microbatches,
                self.stage,
                self.microbatch,
                self.tokens,
                self.blocks,
                _DTYPES.index(self.dtype),
                self.width,
                self.consumed,
                0,
            ]
        )
        return words


def unpack(words: torch.Tensor, peer: int, rank: int) -> Header:
    """The header in ``words``, which ``rank`` received from ``peer``.

    :class:`UBRankMismatchError` if it is no header of this version.
    """
    values: list[int] = words[:_FIELDS].tolist()
    if values[0] != MAGIC or values[1] not in (0, 1):
        raise UBRankMismatchError(
            f"rank {rank} received from rank {peer} a header that begins with {values[0]:#x}, {values[1]}; it expects "
            f"{MAGIC:#x}, 0 or 1: both ranks need the same version of ub_dynamic"
        )
    direction: Direction = "forward" if values[1] == 0 else "backward"
    step, microbatches, stage, microbatch, tokens, blocks, dtype, width, consumed = values[2:11]
    return Header(direction, step, microbatches, stage, microbatch, tokens, blocks, _DTYPES[dtype], width, consumed)


_COMPARED = ("direction", "step", "microbatches", "stage", "microbatch", "tokens", "blocks", "dtype", "width")


def check(received: Header, expected: Header, peer: int, rank: int) -> None:
    """:class:`UBRankMismatchError` unless the header is the one that comes next; ``consumed`` is not compared."""
    for name in _COMPARED:
        theirs, mine = getattr(received, name), getattr(expected, name)
        if mine is not None and theirs != mine:
            raise UBRankMismatchError(
                f"{name} differs between rank {peer} and rank {rank}: rank {peer} sent {name} {theirs} (the "
                f"{received}), rank {rank} expects {name} {mine} (the {expected})"
            )


def check_dtype(dtype: torch.dtype) -> None:
    """:class:`UBUnsupportedError` for a dtype that a header cannot name."""
    if dtype not in _DTYPES:
        names = ", ".join(str(known) for known in _DTYPES)
        raise UBUnsupportedError(f"dtype {dtype} does not travel between stages; these do: {names}")


def pack_abort(error: BaseException) -> torch.Tensor:
    """A header that tells the peers of this rank that it has failed, and why (cut to fit)."""
    note = f"{type(error).__name__}: {error}".encode()[:_NOTE_BYTES]
    words = torch.zeros(WORDS, dtype=torch.int64)
    words[0], words[1], words[_FIELDS - 1] = MAGIC, _KINDS.index("abort"), len(note)
    words[_FIELDS:].view(torch.uint8)[: len(note)] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
    return words


def peer_failure(words: torch.Tensor, peer: int, rank: int) -> UBDynamicError | None:
    """The error to raise on ``rank`` if ``words`` say that a rank has failed: of the same kind, with its text."""
    if words[0] != MAGIC or words[1] != _KINDS.index("abort"):
        return None
    length = int(words[_FIELDS - 1])
    note = bytes(words[_FIELDS:].view(torch.uint8)[:length].tolist()).decode(errors="replace")
    kind: Any = getattr(errors, note.split(":", 1)[0], None)
    if not (isinstance(kind, type) and issubclass(kind, UBDynamicError)):
        kind = UBStateError
    error: UBDynamicError = kind(f"rank {rank} stops, as rank {peer} reports a failure: {note}")
    return error

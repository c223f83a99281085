# SPDX-License-Identifier: Apache-2.0
"""Messages between stages, sent, on their way and received, and the channels that they go through."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .buffers import Lease
from .headers import Direction, Header
from .wires import Work


@dataclass(frozen=True)
class Message:
    """What arrived: T, the hidden state (or its gradient), the blocks, and the buffer under each of them."""

    tokens: int
    leases: tuple[Lease, ...]

    @property
    def hidden(self) -> torch.Tensor:
        return self.leases[0].tensor

    @property
    def blocks(self) -> list[torch.Tensor]:
        return [lease.tensor for lease in self.leases[1:]]


@dataclass
class Traffic:
    """What this rank has sent to others since the step began, counted as it is handed to the wire.

    ``blocks``, ``tensor_bytes``: by (direction, microbatch). ``messages``, ``header_bytes``: of all.
    """

    blocks: Counter[tuple[Direction, int]] = field(default_factory=Counter)
    tensor_bytes: Counter[tuple[Direction, int]] = field(default_factory=Counter)
    messages: int = 0
    header_bytes: int = 0


@dataclass
class Arrival:
    """A message on its way. ``tensors``: their buffers and their transfer, once the header was read."""

    expected: Header
    serial: int
    words: torch.Tensor
    header: Work
    tensors: tuple[tuple[Lease, ...], Work] | None = None


@dataclass(frozen=True)
class Sent:
    """A send that may still be under way: it pins its tensors, and the buffers that these may lie in."""

    header: Header
    works: tuple[Work, Work]
    tensors: Sequence[torch.Tensor]
    leases: Sequence[Lease]


@dataclass
class Channel:
    """One direction to or from one neighbour. ``count``: messages sent or posted; ``taken``: fully received."""

    peer: int
    count: int = 0
    taken: int = 0
    pending: deque[Sent] = field(default_factory=deque)


Channels = dict[Direction, Channel]

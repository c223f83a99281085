# SPDX-License-Identifier: Apache-2.0
"""Random sequences of what training does to the communicators: the same sequence on every rank, from one seed.

The generator knows the order of pipeline schedules (1F1B: forward i + 1 may come before backward i, backwards in
the order of their forwards) and nothing of any backend; whoever runs the operations compares the results.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["set_shape", "all_gather", "reduce_scatter", "forward", "backward", "eval"]


@dataclass(frozen=True)
class Operation:
    """One operation at T = ``tokens``.

    ``set_shape``: change the active shape, and no more. ``all_gather``, ``reduce_scatter``: one collective on the
    communicator ``name``, at the active shape, which ``tokens`` is. ``forward``, ``backward``: of the layers of
    ``name``, for ``microbatch``; a backward comes later than its forward, while the active shape may be another
    one. ``eval``: a forward without gradients. ``seed``: for the data of the operation.
    """

    number: int
    kind: Kind
    tokens: int
    seed: int
    name: str = ""
    microbatch: int = -1


def random_operations(
    count: int,
    seed: int,
    lengths: Sequence[int],
    *,
    gathers: Sequence[str] = (),
    scatters: Sequence[str] = (),
    layers: Sequence[str] = (),
    in_flight: int = 3,
) -> Iterator[Operation]:
    """``count`` operations over the token counts ``lengths``, and then the backwards that are still owed.

    ``gathers``, ``scatters``: communicators for collectives of their own; ``layers``: what forward and backward
    run. At most ``in_flight`` microbatches wait for their backward. The active shape starts at ``max(lengths)``;
    it grows, shrinks and stays, one in three each where possible.
    """
    rng = random.Random(seed)
    lengths = sorted(set(lengths))
    kinds: list[Kind] = ["set_shape"] * 3
    kinds += ["all_gather"] * 2 if gathers else []
    kinds += ["reduce_scatter"] * 2 if scatters else []
    kinds += ["forward", "forward", "backward", "backward", "eval"] if layers else []
    active = lengths[-1]
    waiting: deque[Operation] = deque()
    microbatches = 0
    for number in range(count):
        kind = rng.choice(kinds)
        if kind == "backward" and not waiting:
            kind = "forward"
        if kind == "forward" and len(waiting) >= in_flight:
            kind = "backward"
        data = rng.getrandbits(31)
        if kind == "backward":
            yield _backward(number, waiting.popleft())
        elif kind == "all_gather" or kind == "reduce_scatter":
            name = rng.choice(gathers if kind == "all_gather" else scatters)
            yield Operation(number, kind, active, data, name)
        else:
            tokens = _next_length(rng, lengths, active)
            if kind == "set_shape":
                active = tokens
                yield Operation(number, kind, tokens, data)
                continue
            operation = Operation(number, kind, tokens, data, rng.choice(layers), microbatches)
            if kind == "forward":
                microbatches += 1
                waiting.append(operation)
            yield operation
    while waiting:
        count += 1
        yield _backward(count - 1, waiting.popleft())


def _backward(number: int, forward: Operation) -> Operation:
    return Operation(number, "backward", forward.tokens, forward.seed, forward.name, forward.microbatch)


def _next_length(rng: random.Random, lengths: Sequence[int], active: int) -> int:
    """Grow, shrink or stay, one in three each, as far as there is room."""
    larger = [tokens for tokens in lengths if tokens > active]
    smaller = [tokens for tokens in lengths if tokens < active]
    return rng.choice(rng.choice((larger or smaller, smaller or larger, [active])) or [active])

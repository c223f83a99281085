# SPDX-License-Identifier: Apache-2.0
"""A byte-and-time model of one layer of context-parallel attention, forward and backward, fed with measured rates."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UBShapeError
from ..packing import PackedBatch

BACKWARD_WORK = 2.5  # five matrix products where the forward has two


@dataclass(frozen=True)
class Links:
    """Measured on the machine in question. ``domain``: ranks next to each other that are joined by the fast links.

    ``fast``, ``slow``: bytes/s that a rank sends inside and across domains; ``latency``: seconds before a message
    flows; ``flops``: attention's floating-point operations/s of one rank.
    """

    fast: float
    slow: float
    flops: float
    domain: int = 8
    latency: float = 10e-6

    def __post_init__(self) -> None:
        for name in ("fast", "slow", "flops", "domain"):
            if getattr(self, name) <= 0:
                raise UBShapeError(f"{name} = {getattr(self, name)}: a measured rate or size must be positive")
        if self.latency < 0:
            raise UBShapeError(f"latency = {self.latency}: seconds must be at least 0")

    def seconds(self, size: float, span: int) -> float:
        """To send ``size`` bytes to a rank at most ``span - 1`` ranks away."""
        return self.latency + size / (self.fast if span <= self.domain else self.slow)


@dataclass(frozen=True)
class Cost:
    """Of one rank. ``inner_bytes``: sent in all-to-alls; ``outer_bytes``: around the ring or in gathers. ``seconds``:
    the layer's, of which ``exposed`` are communication that nothing hides; None where no rates were given."""

    inner_bytes: float
    outer_bytes: float
    seconds: float | None = None
    exposed: float | None = None

    @property
    def bytes(self) -> float:
        return self.inner_bytes + self.outer_bytes


@dataclass(frozen=True)
class Attention:
    """The sizes that cost depends on: heads, key heads, head size, bytes an element, and the mask."""

    heads: int
    kv_heads: int
    head_size: int
    itemsize: int
    causal: bool

    def work(self, batch: PackedBatch) -> float:
        """Floating-point operations of the forward, over all ranks."""
        pairs = sum(length * length for length in batch.seqlens) / (2 if self.causal else 1)
        return 4.0 * self.heads * self.head_size * pairs


def estimate(batch: PackedBatch, sizes: Attention, inner: int, outer: int, gathered: bool, links: Links | None) -> Cost:
    """The cost of an all-to-all over ``inner`` ranks inside a ring of ``outer``.

    With ``gathered`` the outer ranks gather all keys and values at once, which nothing hides, instead of a ring whose
    hops run beside the multiplications.
    """
    row = sizes.head_size * sizes.itemsize * batch.local_tokens
    heads_and_back = 2 * row * (2 * sizes.heads + 2 * sizes.kv_heads) * (inner - 1) / inner
    key_values = 2 * row * sizes.kv_heads
    # Keys once forward and once backward over outer-1 hops; their gradients over a full turn, or one reduce-scatter.
    turns = 3 * (outer - 1) if gathered else 2 * (outer - 1) + (outer if outer > 1 else 0)
    cost = Cost(heads_and_back, key_values * turns)
    if links is None:
        return cost
    compute = sizes.work(batch) / batch.cp / links.flops
    exposed = 4 * links.seconds(heads_and_back / 4, inner) if inner > 1 else 0.0
    if outer > 1 and gathered:
        exposed += 3 * links.seconds(key_values * (outer - 1), inner * outer)
    elif outer > 1:
        # A hop is hidden behind a step; in the backward a hop carries keys and gradients.
        for step, size in ((compute / outer, key_values), (BACKWARD_WORK * compute / outer, 2 * key_values)):
            exposed += (outer - 1) * max(links.seconds(size, inner * outer) - step, 0.0)
        exposed += links.seconds(key_values, inner * outer)  # the gradients' last hop home
    return Cost(cost.inner_bytes, cost.outer_bytes, (1 + BACKWARD_WORK) * compute + exposed, exposed)

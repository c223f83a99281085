# SPDX-License-Identifier: Apache-2.0
"""Steps of an MLP on the host communicators in every arm: two linears of one shape, on buffers of several kinds.

The arms are those of :mod:`ub_dynamic.bench.te_steps`; ``none`` takes plain collectives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..backends.host import ColumnParallelLinear, HostBackend, RowParallelLinear
from ..backends.names import resolve_specs
from ..policy import Policy
from .arms import said, use_arm
from .interleave import BLOCK_MS, no_collection
from .worlds import HostWorld


class _MLP(torch.nn.Module):
    """fc1, GELU, fc2; ``like``: with its parameters."""

    def __init__(
        self,
        world: HostWorld,
        hidden: int,
        ffn: int,
        like: _MLP | None = None,
        overlap: bool = True,
        backend: HostBackend | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(
            hidden, ffn, bias=False, ub_name="fc1", dtype=world.dtype, overlap=overlap, backend=backend
        )
        self.fc2 = RowParallelLinear(
            ffn, hidden, bias=False, ub_name="fc2", dtype=world.dtype, overlap=overlap, backend=backend
        )
        if like is not None:
            self.fc1.weight, self.fc2.weight = like.fc1.weight, like.fc2.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(torch.nn.functional.gelu(self.fc1(x)))
        return out


class HostSteps:
    """Blocks of steps in each arm; ``exact``: communicators made for exactly so many tokens."""

    block_ms = BLOCK_MS

    def __init__(
        self,
        world: HostWorld,
        capacity: int,
        hidden: int,
        ffn: int,
        operands: tuple[torch.Tensor, ...],
        exact: int | None,
        policy: Policy | None,
    ) -> None:
        self.world, self.capacity, self.hidden, self._policy = world, capacity, hidden, policy
        options = {} if policy is None else {"policy": policy}
        self.manager = world.initialize(capacity, hidden, **options)
        dynamic = _MLP(world, hidden, ffn)
        self._models = dict.fromkeys(("dynamic", "policy", "pad", "unguarded", "auto"), dynamic)
        self._models["none"] = _MLP(world, hidden, ffn, dynamic, overlap=False)
        self._exact: HostBackend | None = None
        if exact is not None:
            self._exact = HostBackend(resolve_specs((exact, hidden), world.size, world.dtype), world.group)
            self._models["exact"] = _MLP(world, hidden, ffn, dynamic, backend=self._exact)
        self._operand, self._grad = operands

    def use(self, arm: str) -> None:
        """The guard and the policy as the arm has them."""
        use_arm(self.manager, arm, self._policy)

    def block(self, arm: str, tokens: int, steps: int) -> float:
        """Milliseconds a step of ``steps`` steps at T = ``tokens`` (``pad``: at capacity)."""
        self.use(arm)
        return self.world.timed(lambda _: self._step(arm, tokens), steps)

    def epoch(self, arm: str, tokens: Sequence[int]) -> float:
        """Milliseconds of one pass over all microbatches, one step each."""
        self.block(arm, tokens[0], 1)
        self.world.meet()
        with no_collection():
            begin = time.perf_counter()
            for each in tokens:
                self._step(arm, each)
            return 1000 * (time.perf_counter() - begin)

    def policy(self, tokens: int) -> dict[str, Any]:
        """Of a row: what the policy chose for the two linears at T."""
        self.use("policy")
        with self.manager.active_shape((tokens, self.hidden)) as report:
            return said(report.overlap, ("fc1", "fc2"))

    def close(self) -> None:
        self.use("unguarded")
        self.world.meet()
        if self._exact is not None:
            self._exact.destroy()
        self.world.destroy()

    def _step(self, arm: str, tokens: int) -> None:
        model, rows = self._models[arm], (self.capacity if arm == "pad" else tokens) // self.world.size
        if arm in ("dynamic", "policy", "unguarded"):
            with self.manager.active_shape((tokens, self.hidden)):
                self._plain(model, rows)
        else:
            self._plain(model, rows)
        if arm == "auto":
            self.manager.reset_active_shape()

    def _plain(self, model: _MLP, rows: int) -> None:
        leaf = self._operand[:rows].detach().requires_grad_()
        model(leaf).backward(self._grad[:rows])
        for parameter in model.parameters():
            parameter.grad = None


class HostFactory:
    """Makes :class:`HostSteps`."""

    def __init__(
        self, world: HostWorld, capacity: int, hidden: int, ffn: int, policy: Policy | None = None, zeros: bool = False
    ) -> None:
        self._world, self._sizes, self._policy = world, (capacity, hidden, ffn), policy
        self._operands = tuple(world.random((capacity // world.size, hidden), seed) for seed in (1, 2))
        if zeros:
            for operand in self._operands:
                operand.zero_()

    def __call__(self, exact: int | None, exact_first: bool = False) -> HostSteps:
        return HostSteps(self._world, *self._sizes, self._operands, exact, self._policy)

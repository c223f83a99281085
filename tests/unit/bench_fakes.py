# SPDX-License-Identifier: Apache-2.0
"""A measurement without real ranks or clock: ranks that are threads, time that passes in blocks, a world of one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ub_dynamic.errors import UBUnsupportedError
from ub_dynamic.rules import TokenRule


class Ranks:
    """Two ranks of which this one is the first: the second's times are ``slower`` times as long."""

    def __init__(self, slower: float = 1.0) -> None:
        self.slower = slower

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, list):
            return [value, [self.slower * each for each in value]]
        return [value, value]


class Clock:
    """Time passes in blocks only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def block(self, model: Callable[[str, int], float]) -> Callable[[str, int], float]:
        def run(arm: str, steps: int) -> float:
            ms = model(arm, steps)
            self.now += steps * ms / 1000
            return ms

        return run


def two_ranks() -> list[Callable[[Any], list[Any]]]:
    """``gather`` of each of two ranks, which are threads."""
    told: list[Any] = [None, None]
    meet = threading.Barrier(2, timeout=30)

    def gather(index: int, value: Any) -> list[Any]:
        told[index] = value
        meet.wait()
        found = list(told)
        meet.wait()
        return found

    return [functools.partial(gather, index) for index in range(2)]


def gather_one(value: Any) -> list[Any]:
    return [value]


class FakeWorld:
    """One rank without communication: each configuration takes the time that ``cost`` says."""

    backend = "host"
    mode = "cpu-mpi"
    rank, size, dtype, cfgs = 0, 2, torch.float32, None

    def __init__(self, cost: Callable[[str, int], float], refuses: tuple[str, ...] = ()) -> None:
        self.cost, self.refuses = cost, refuses
        self.standing = "default"
        self.manager: Any = None
        self.initialised = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def meet(self) -> None:
        return

    def initialize(self, capacity: int, hidden: int, policy: Any = None, **options: Any) -> Any:
        for configs in policy.configurations().values():
            for config in configs:
                if config.method in self.refuses:
                    raise UBUnsupportedError(f"no {config.method} here")
        self.initialised += 1
        return FakeManager(self, (capacity, hidden))

    def destroy(self) -> None:
        self.initialised -= 1

    def linear(self, name: str, before: int, after: int, mode: str) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def plain_linear(self, before: int, after: int) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def random(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return torch.zeros(1).expand(shape)

    def timed(self, step: Any, steps: int, before: Any = None) -> float:
        return self.cost(self.standing, steps)


class FakeManager:
    def __init__(self, world: FakeWorld, capacity: tuple[int, int]) -> None:
        self.capacity, self.backend = capacity, self
        self._world, self._rule = world, TokenRule(2, 2, capacity[0])

    def plan(self, choices: Any) -> str:
        return next((str(config) for config in choices.values()), "default")

    def switch(self, plan: str) -> None:
        self._world.standing = plan

    def round_up_tokens(self, tokens: int) -> int:
        return self._rule.round_up(tokens)

    def set_active_shape(self, shape: Any) -> None:
        return

# SPDX-License-Identifier: Apache-2.0
"""One GEMM with its collective as a thing to time: its layer, its operands at capacity, its configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ..errors import UBShapeError, UBUnsupportedError
from ..manager import Manager
from ..overlap import OverlapConfig
from ..policy import Choice, Policy
from .operations import Gemm
from .worlds import World

Wanted = Mapping[str, Sequence[OverlapConfig]]
"""Per GEMM, the configurations that are to be measured."""
Refused = dict[tuple[str, OverlapConfig], str]


class Subject:
    """Blocks of the forward, or of the backward, of ``layer`` at any T up to the capacity.

    A forward runs as training runs it, with what autograd keeps. Before each backward its forward runs, untimed.
    """

    def __init__(self, world: World, gemm: Gemm, layer: torch.nn.Module, sizes: tuple[int, int], capacity: int) -> None:
        self._world, self._gemm, self._layer = world, gemm, layer
        self._parameters = list(layer.parameters())
        self._operand = world.random((capacity, sizes[0]), 1)
        self._grad = world.random((capacity, sizes[1]), 2) if gemm.backward else None

    def block(self, rows: int, steps: int, rows_out: int) -> float:
        """Milliseconds a step with ``rows`` rows of input and ``rows_out`` of output on this rank."""
        leaf = self._operand[:rows].detach().requires_grad_()
        if self._grad is None:
            return self._world.timed(lambda _: self._layer(leaf), steps)
        grad = self._grad[:rows_out]

        def before() -> torch.Tensor:
            leaf.grad = None
            for parameter in self._parameters:
                parameter.grad = None
            output: torch.Tensor = self._layer(leaf)
            return output

        return self._world.timed(lambda output: output.backward(grad), steps, before)


class Operation:
    """``gemm`` through a tensor-parallel layer, or as its plain GEMM."""

    def __init__(self, world: World, gemm: Gemm, hidden: int, ffn: int, capacity: int, plain: bool = False) -> None:
        before, after = gemm.features(hidden, ffn)
        local = gemm.local_features(hidden, ffn, world.size)
        if plain:
            layer = world.plain_linear(*local)
        else:
            layer = world.linear(gemm.layer, before, after, "column" if gemm.column else "row")
        self._tp, self._gemm, self._plain = world.size, gemm, plain
        self.subject = Subject(world, gemm, layer, local, capacity)

    def block(self, tokens: int, steps: int) -> float:
        """Milliseconds a step at T = ``tokens``; the active shape is T."""
        rows, rows_out = self._gemm.local_rows(tokens, 1 if self._plain else self._tp)
        return self.subject.block(rows, steps, rows_out)


class Switched:
    """An operation in any of its configurations: the switch is made before each block, and is not timed."""

    def __init__(self, manager: Manager, gemm: Gemm, operation: Operation) -> None:
        self._backend, self._gemm, self._operation = manager.backend, gemm, operation
        self._plans: dict[OverlapConfig | None, Any] = {}

    def block(self, config: OverlapConfig | None, tokens: int, steps: int) -> float:
        """``config`` None: as it was configured."""
        if config not in self._plans:
            self._plans[config] = self._backend.plan({} if config is None else {self._gemm.name: config})
        self._backend.switch(self._plans[config])
        return self._operation.block(tokens, steps)


def register(world: World, capacity: int, hidden: int, wanted: Wanted, **options: Any) -> tuple[Manager, Refused]:
    """Initialise with every configuration of ``wanted`` that can be had, and say why the others cannot.

    Without the guard and the comparison of ranks, which cost the same in every arm.
    """
    options = {"guard": False, "check": "never", **options}
    try:
        return world.initialize(capacity, hidden, policy=probing(wanted), **options), {}
    except (UBUnsupportedError, UBShapeError):
        refused = _refused(world, capacity, hidden, wanted, options)
        if not refused:
            raise
    left = {gemm: [each for each in configs if (gemm, each) not in refused] for gemm, configs in wanted.items()}
    return world.initialize(capacity, hidden, policy=probing(left), **options), refused


def _refused(world: World, capacity: int, hidden: int, wanted: Wanted, options: Mapping[str, Any]) -> Refused:
    """Each configuration on its own, at a small capacity."""
    found: Refused = {}
    small = min(capacity, 64 * world.size)
    for gemm, configs in wanted.items():
        for config in configs:
            try:
                world.initialize(small, hidden, policy=probing({gemm: [config]}), **options)
            except (UBUnsupportedError, UBShapeError) as error:
                found[gemm, config] = str(error)
            else:
                world.destroy()
    return found


def probing(wanted: Wanted) -> Policy:
    """A policy that names every configuration somewhere, so that ``initialize_ub`` prepares all of them.

    Its first stage, which is as configured, is that of every T: the others begin beyond any T.
    """
    most = max((len(configs) for configs in wanted.values()), default=0)
    stages = [
        MappingProxyType(
            {gemm: Choice(configs[index], "to be measured") for gemm, configs in wanted.items() if index < len(configs)}
        )
        for index in range(most)
    ]
    beyond = 2**31
    return Policy((1, *range(beyond, beyond + most)), (MappingProxyType({}), *stages))

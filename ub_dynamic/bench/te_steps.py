# SPDX-License-Identifier: Apache-2.0
"""Steps of one of TE's layers in every arm: dynamic communicators and TE's own of one exact shape in one process.

TE's table of communicators is pointed at one set or the other between blocks. ``exact`` and ``pad`` are stock TE,
without the guard's wrappers; ``dynamic`` enters ``active_shape`` anew in each step, two shape changes; ``policy`` is
the same with a policy; ``unguarded`` the same as ``dynamic`` without the guard, ``auto`` the same with no call at all;
``none`` is the same layer without overlap (NCCL).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from .. import api
from ..policy import Choices, Policy
from ..testing.te_layers import KINDS, OVERLAPS, LayerKind, build, random_tensor
from ..testing.te_memory import initialise
from ..testing.te_world import World, make_stock_userbuffers, ub_cfgs_with_room
from .arms import said, use_arm
from .interleave import no_collection
from .operations import LAYERS
from .worlds import WARM

# Putting the guard's wrappers into TE's classes, or taking them out, makes CPython forget what it has specialised for
# them; it specialises again after so many runs, which a training job has behind it after its first seconds. Blocks of
# few, long steps do not wait for it: there the device is the limit.
_SPECIALISED, _FEW = 60, 24
_LONG = 3  # steps of a block whose first one alone fills the device's queue

Step = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, int], None]


class Sets:
    """The dynamic communicators and TE's own of one exact shape, in one process; TE's table names one of them.

    Both register on the one native communicator of the process, which has room for 31 regions: two sets of twelve.
    """

    def __init__(
        self,
        world: World,
        capacity: int,
        hidden: int,
        exact: int | None,
        exact_first: bool = False,
        policy: Policy | None = None,
    ) -> None:
        import transformer_engine.pytorch.module.base as base

        self._base, self._world, self._policy = base, world, policy
        self.capacity, self.hidden = capacity, hidden
        self._exact: dict[Any, Any] = {}
        self._helpers: list[Any] = []  # TE's bootstrap object, which the shared communicator calls for the second set
        if exact is not None and exact_first:
            self._make_exact(exact)
        base._ub_communicators = None
        options: dict[str, Any] = {} if policy is None else {"policy": policy}
        self.manager = initialise(world, [capacity, hidden], ub_cfgs=ub_cfgs_with_room(world), **options)
        self._dynamic = base._ub_communicators
        if exact is not None and not exact_first:
            self._make_exact(exact)
        self.use("unguarded")

    def _make_exact(self, tokens: int) -> None:
        import transformer_engine_torch as tex

        make = tex.CommOverlapHelper

        def keep(*groups: Any) -> Any:
            self._helpers.append(make(*groups))
            return self._helpers[-1]

        self._base._ub_communicators = None
        with mock.patch.object(tex, "CommOverlapHelper", keep):
            make_stock_userbuffers(self._world, [tokens, self.hidden])
        self._exact = self._base._ub_communicators

    def use(self, arm: str) -> None:
        """Point TE at the communicators of an arm, and put the guard's wrappers where the arm has them."""
        self._base._ub_communicators = self._dynamic
        use_arm(self.manager, arm, self._policy)
        if arm == "exact":
            self._base._ub_communicators = self._exact

    def close(self) -> None:
        self.use("unguarded")
        self._world.barrier()
        self._exact.clear()
        self._exact = self._dynamic = {}
        api.destroy_ub()
        self._helpers.clear()


class TESteps:
    """The layers, their operands, and blocks of steps in each arm. ``layers``: with and without overlap."""

    block_ms = 120.0

    def __init__(
        self, world: World, sets: Sets, layers: Mapping[bool, torch.nn.Module], operands: torch.Tensor, kind: LayerKind
    ) -> None:
        self.world, self.sets, self.kind, self.operands = world, sets, kind, operands
        self._layers = layers

    def block(self, arm: str, tokens: int, steps: int) -> float:
        """Milliseconds a step, on the device, of ``steps`` steps at T = ``tokens`` (``pad``: at capacity)."""
        self.sets.use(arm)
        leaf, grad = self._operands(self.sets.capacity if arm == "pad" else tokens)
        one, layer = self.arm(arm), self._layers[arm != "none"]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with no_collection():
            for _ in range(_SPECIALISED if steps > _FEW else WARM if steps > _LONG else 1):
                one(layer, leaf, grad, tokens)
            begin.record()
            for _ in range(steps):
                one(layer, leaf, grad, tokens)
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / steps

    def epoch(self, arm: str, tokens: Sequence[int]) -> float:
        """Milliseconds of one pass over all microbatches, one step each, without a pause between them."""
        self.block(arm, tokens[0], 1)
        operands = [self._operands(self.sets.capacity if arm == "pad" else each) for each in tokens]
        one, layer = self.arm(arm), self._layers[arm != "none"]
        self.world.barrier()
        with no_collection():
            begin = time.perf_counter()
            for each, (leaf, grad) in zip(tokens, operands, strict=True):
                one(layer, leaf, grad, each)
            torch.cuda.synchronize()
            return 1000 * (time.perf_counter() - begin)

    def policy(self, tokens: int) -> dict[str, Any]:
        """Of a row: what the policy chose for this layer at T, and what it does otherwise, as its own flags say."""
        layers = LAYERS if self.kind.name == "te.TransformerLayer" else ("fc1", "fc2")
        self.sets.use("policy")
        with self.sets.manager.active_shape([tokens, self.sets.hidden]) as report:
            return said(report.overlap, layers, all_the_same(self._layers[True], report.overlap))

    def close(self) -> None:
        self.sets.close()

    def arm(self, name: str) -> Step:
        return {"dynamic": self._set, "policy": self._set, "unguarded": self._set, "auto": self._auto}.get(name, _plain)

    def _operands(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.kind.input_shape(tokens, self.sets.hidden, self.world.size)
        leaf, grad = (self.operands[index, : shape[0]].view(shape) for index in (0, 1))
        return leaf.detach().requires_grad_(), grad

    def _set(self, layer: torch.nn.Module, leaf: torch.Tensor, grad: torch.Tensor, tokens: int) -> None:
        with self.sets.manager.active_shape([tokens, self.sets.hidden]):
            _plain(layer, leaf, grad, tokens)

    def _auto(self, layer: torch.nn.Module, leaf: torch.Tensor, grad: torch.Tensor, tokens: int) -> None:
        _plain(layer, leaf, grad, tokens)
        self.sets.manager.reset_active_shape()  # as many changes as active_shape makes


def all_the_same(layer: torch.nn.Module, choices: Choices) -> tuple[str, ...]:
    """The gathers that ``layer`` overlaps now though none was chosen: of a LayerNormMLP one flag has two of them."""
    import transformer_engine.pytorch as te

    flags = [each.ub_overlap_ag for each in layer.modules() if isinstance(each, te.LayerNormMLP)]
    return tuple(
        f"{gemm} overlaps all the same: LayerNormMLP has one flag for it and {other}"
        for gemm, other in (("fc1_fprop", "fc2_dgrad"), ("fc2_dgrad", "fc1_fprop"))
        if gemm in choices and choices[gemm].config.method == "none" and any(flags)
    )


def _plain(layer: torch.nn.Module, leaf: torch.Tensor, grad: torch.Tensor, _tokens: int) -> None:
    layer(leaf).backward(grad)
    leaf.grad = None
    for parameter in layer.parameters():
        parameter.grad = None


class TEFactory:
    """Makes :class:`TESteps`, on layers that are built, and functions that are compiled, once."""

    def __init__(
        self,
        world: World,
        capacity: int,
        hidden: int,
        layer: str,
        none: bool,
        policy: Policy | None = None,
        zeros: bool = False,
    ) -> None:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled here runs as it is, in every arm
        self._world, self._sizes, self._policy = world, (capacity, hidden), policy
        self._kind = KINDS[layer]
        self._operands = random_tensor((2, capacity // world.size, hidden), world, 1)
        if zeros:
            self._operands.zero_()
        sets = Sets(world, capacity, hidden, None)  # TE wants UserBuffers before it makes a layer that overlaps
        with_overlap = (True, False) if none else (True,)
        self._layers = {on: build(self._kind, OVERLAPS["default"], hidden, world, on) for on in with_overlap}
        if zeros:
            for parameter in (each for layer in self._layers.values() for each in layer.parameters()):
                parameter.data.zero_()
        steps = TESteps(world, sets, self._layers, self._operands, self._kind)
        for tokens in (capacity, capacity // 2, capacity // 4):  # TE's fused functions are compiled, for other T too
            for arm in ("dynamic", "none") if none else ("dynamic",):
                steps.block(arm, tokens, 1)
        steps.close()

    def __call__(self, exact: int | None, exact_first: bool = False) -> TESteps:
        sets = Sets(self._world, *self._sizes, exact, exact_first, self._policy)
        return TESteps(self._world, sets, self._layers, self._operands, self._kind)

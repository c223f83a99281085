# SPDX-License-Identifier: Apache-2.0
"""Host layers on communicators of capacity C with active T against those made for exactly T: bit by bit.

As :mod:`.host_bits` does it for single communicators: with float64 in a single process beside it, and all registered
memory filled with NaN before each step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.host import ColumnParallelLinear, HostBackend, RowParallelLinear
from ..backends.names import resolve_specs
from ..groups import Group
from ..rules import combine, token_rule
from ..shapes import CommSpec
from .host_bits import rounding

# ub_cfgs of the layer cases: TE's defaults, dgrad with reduce-scatter in both ways, ring reduce-scatter forward
LAYER_CFGS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "dgrad ring": {"qkv_dgrad": {"method": "ring_exchange"}, "fc2_fprop": {"method": "ring_exchange"}},
    "dgrad pipeline": {"qkv_dgrad": {"method": "pipeline"}, "fc1_dgrad": {"method": "pipeline", "num_splits": 2}},
    "aggregate": {"qkv_fprop": {"aggregate": True}, "proj_dgrad": {"aggregate": True}, "fc1_dgrad": {"method": "bulk"}},
}


@dataclass(frozen=True)
class LayerCase:
    """One random two-layer block (column, row) and its data."""

    config: str
    names: tuple[str, str]
    capacity: int
    lengths: tuple[int, ...]
    hidden: int
    dtype: torch.dtype
    seed: int


def random_layer_cases(tp: int, count: int, seed: int) -> Iterator[LayerCase]:
    """``count`` cases, the same on every rank, through all of :data:`LAYER_CFGS`."""
    rng = random.Random(f"layers {tp} {seed}")
    configs = list(LAYER_CFGS)
    for number in range(count):
        hidden = 32 * rng.randint(1, 4)
        dtype = rng.choice((torch.float32, torch.bfloat16))
        config = configs[number % len(configs)]
        specs = resolve_specs((tp * 48, hidden), tp, dtype, LAYER_CFGS[config])
        rule = combine((token_rule(spec) for spec in specs), tp * 48)
        capacity = rng.randrange(rule.minimum + 4 * rule.multiple, rule.maximum + 1, rule.multiple)
        lengths = tuple(rng.randrange(rule.minimum, capacity + 1, rule.multiple) for _ in range(3))
        names = rng.choice((("qkv", "proj"), ("fc1", "fc2")))
        yield LayerCase(config, names, capacity, (*lengths, capacity), hidden, dtype, seed + number)


def run_layer_case(group: Group, case: LayerCase) -> list[str]:
    """Forward and all gradients at each T of the case, on capacity buffers and on buffers for exactly T."""
    dynamic = HostBackend(_specs(case, case.capacity, group.size), group)
    block = _Block(case, dynamic)
    wrong = []
    for tokens in case.lengths:
        exact = HostBackend(_specs(case, tokens, group.size), group)
        poison(dynamic)
        poison(exact)
        dynamic.apply(tokens)
        results = block.step(tokens)
        for name, value in block.on(exact).step(tokens).items():
            if not torch.equal(results[name], value):
                wrong.append(f"{case}, T = {tokens}, {name}: active T and exact T differ")
        wrong += [
            f"{case}, T = {tokens}, {name}: off the float64 result by {error:.3g}"
            for name, error in block.errors(tokens, results).items()
            if not error <= 8 * rounding(case.dtype)
        ]
        exact.destroy()
    dynamic.destroy()
    return wrong


def poison(backend: HostBackend) -> None:
    """Fill all registered memory of a backend with NaN."""
    for name in backend.specs:
        backend.communicator(name).poison()


def _specs(case: LayerCase, capacity: int, tp: int) -> tuple[CommSpec, ...]:
    return resolve_specs((capacity, case.hidden), tp, case.dtype, LAYER_CFGS[case.config])


class _Block:
    """``row(tanh(column(x)))`` with the same parameters on any backend, and in float64 in one process."""

    def __init__(self, case: LayerCase, backend: HostBackend) -> None:
        self._case, self._rank, self._tp = case, backend.group.rank, backend.tp
        torch.manual_seed(case.seed)
        width, kwargs = 2 * case.hidden, {"dtype": case.dtype, "backend": backend}
        self._column = ColumnParallelLinear(case.hidden, width, ub_name=case.names[0], **kwargs)  # type: ignore[arg-type]
        self._row = RowParallelLinear(width, case.hidden, ub_name=case.names[1], **kwargs)  # type: ignore[arg-type]
        torch.manual_seed(case.seed)  # nn.Linear draws in the same order
        self._whole = [
            _draw(case.hidden, width, case.dtype),
            _draw(width, case.hidden, case.dtype),
        ]

    def on(self, backend: HostBackend) -> _Block:
        """The same parameters on other buffers."""
        other = object.__new__(_Block)
        other.__dict__.update(self.__dict__)
        case, width = self._case, 2 * self._case.hidden
        kwargs: Any = {"dtype": case.dtype, "backend": backend}
        other._column = ColumnParallelLinear(case.hidden, width, ub_name=case.names[0], **kwargs)
        other._row = RowParallelLinear(width, case.hidden, ub_name=case.names[1], **kwargs)
        other._column.load_state_dict(self._column.state_dict())
        other._row.load_state_dict(self._row.state_dict())
        return other

    def step(self, tokens: int) -> dict[str, torch.Tensor]:
        """Output and gradients of one forward and backward."""
        x, grad = self._inputs(tokens)
        own = slice(self._rank * (tokens // self._tp), (self._rank + 1) * (tokens // self._tp))
        local = x[own].clone().requires_grad_()
        parameters = {**dict(self._column.named_parameters("column")), **dict(self._row.named_parameters("row"))}
        out = self._row(torch.tanh(self._column(local)))
        grads = torch.autograd.grad(out, [local, *parameters.values()], grad[own])
        return {"out": out.detach(), "x.grad": grads[0], **dict(zip(parameters, grads[1:], strict=True))}

    def errors(self, tokens: int, results: dict[str, torch.Tensor]) -> dict[str, float]:
        """Relative error (in the 2-norm) of each result against float64 in one process."""
        expected = self._reference(tokens)
        return {
            name: float((value.double() - expected[name]).norm() / expected[name].norm())
            for name, value in results.items()
        }

    def _inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._case.seed * 100003 + tokens)
        shape = (tokens, self._case.hidden)
        return tuple(torch.randn(shape, generator=generator).to(self._case.dtype) for _ in range(2))  # type: ignore[return-value]

    def _reference(self, tokens: int) -> dict[str, torch.Tensor]:
        x, grad = self._inputs(tokens)
        (w1, b1), (w2, b2) = ([part.double().requires_grad_() for part in layer] for layer in self._whole)
        leaf = x.double().requires_grad_()
        out = torch.tanh(leaf @ w1.t() + b1) @ w2.t() + b2
        gx, gw1, gb1, gw2, _ = torch.autograd.grad(out, [leaf, w1, b1, w2, b2], grad.double())
        rank, tp = self._rank, self._tp
        rows = slice(rank * (tokens // tp), (rank + 1) * (tokens // tp))
        own = slice(rank * (len(b1) // tp), (rank + 1) * (len(b1) // tp))
        return {
            "out": out.detach()[rows],
            "x.grad": gx[rows],
            "column.weight": gw1[own],
            "column.bias": gb1[own],
            "row.weight": gw2[:, own],
            "row.bias": grad[rows].double().sum(0),
        }


def _draw(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    linear = torch.nn.Linear(in_features, out_features)
    return linear.weight.detach().to(dtype), linear.bias.detach().to(dtype)

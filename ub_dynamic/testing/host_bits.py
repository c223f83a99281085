# SPDX-License-Identifier: Apache-2.0
"""Host communicators and layers of capacity C with active T against those made for exactly T: bit by bit.

Each case also compares with a float64 computation in a single process. All registered memory, staging
included, is filled with NaN before each operation, so that a read past what was written shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.host import ColumnParallelLinear, HostBackend, RowParallelLinear
from ..backends.host.bulk import BulkAllGather, BulkReduceScatter
from ..backends.host.communicator import Communicator
from ..backends.host.pipeline import PipelineReduceScatter
from ..backends.host.ring import RingAllGather, RingReduceScatter
from ..backends.names import resolve_specs
from ..groups import Group
from ..rules import combine, token_rule
from ..shapes import Collective, CommSpec, Method

COMMUNICATORS: tuple[tuple[Method, Collective], ...] = (
    ("bulk", "ag"),
    ("bulk", "rs"),
    ("pipeline", "rs"),
    ("ring_exchange", "ag"),
    ("ring_exchange", "rs"),
)
# ub_cfgs of the layer cases: TE's defaults, dgrad with reduce-scatter in both ways, ring reduce-scatter forward
LAYER_CFGS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "dgrad ring": {"qkv_dgrad": {"method": "ring_exchange"}, "fc2_fprop": {"method": "ring_exchange"}},
    "dgrad pipeline": {"qkv_dgrad": {"method": "pipeline"}, "fc1_dgrad": {"method": "pipeline", "num_splits": 2}},
    "aggregate": {"qkv_fprop": {"aggregate": True}, "proj_dgrad": {"aggregate": True}, "fc1_dgrad": {"method": "bulk"}},
}


@dataclass(frozen=True)
class Case:
    """One random communicator: its capacity, the active T, the size of its GEMM, and the seed of its data."""

    capacity: int
    tokens: int
    hidden: int
    inner: int
    dtype: torch.dtype
    num_splits: int
    aggregate: bool
    seed: int


def random_cases(method: Method, collective: Collective, tp: int, count: int, seed: int) -> Iterator[Case]:
    """``count`` valid cases, the same on every rank; one in ten is large enough for MPI's rendezvous protocol."""
    rng = random.Random(f"{method} {collective} {tp} {seed}")
    for number in range(count):
        large = rng.random() < 0.1
        splits = rng.choice((1, 2, 4)) if method == "pipeline" else 4
        hidden = rng.randint(1, 24 if not large else 64) * (
            8 * splits if method == "pipeline" else rng.choice((1, 8, 16))
        )
        dtype = rng.choice((torch.float32, torch.bfloat16))
        limit = tp * rng.randint(33, 512 if large else 64)
        spec = CommSpec("case", method, collective, (limit, hidden), tp, dtype, splits)
        rule = token_rule(spec)
        capacity = rng.randrange(rule.minimum, rule.maximum + 1, rule.multiple)
        # exactly the capacity, the smallest valid T, or anything between
        tokens = rng.choice((capacity, rule.minimum, rng.randrange(rule.minimum, capacity + 1, rule.multiple)))
        aggregate = method == "ring_exchange" and collective == "ag" and rng.random() < 0.3
        yield Case(capacity, tokens, hidden, rng.randint(1, 40), dtype, splits, aggregate, seed + number)


def run_case(backend: HostBackend, method: Method, collective: Collective, case: Case) -> list[str]:
    """What differs, as text; empty if everything is as it must be. Collective over the backend's group.

    ``backend`` lends its engine (transport and progress thread), which knows the names of :data:`NAMES`.
    """
    dynamic = _make(backend, NAMES[0], method, collective, case, case.capacity)
    exact = _make(backend, NAMES[1], method, collective, case, case.tokens)
    dynamic.set_tokens(case.tokens)
    run, reference = (_gather, _gather_reference) if collective == "ag" else (_scatter, _scatter_reference)
    wrong = []
    results = [run(dynamic, case), run(exact, case)]
    if not torch.equal(results[0], results[1]):
        wrong.append(f"{method} {collective} {case}: active T and exact T differ")
    expected, bound = reference(case, backend.group.rank, backend.tp)
    error = (results[0].double() - expected).abs()
    if not bool((error <= bound).all()):  # NaN fails too
        wrong.append(f"{method} {collective} {case}: off the float64 result by {float((error - bound).max()):.3g}")
    return wrong


NAMES = ("dynamic", "exact")


def case_backend(group: Group) -> HostBackend:
    """A backend whose engine the communicators of :func:`run_case` use. Collective."""
    tp = group.size
    return HostBackend([CommSpec(name, "ring_exchange", "ag", (tp, 1), tp, torch.float32) for name in NAMES], group)


def _make(
    backend: HostBackend, name: str, method: Method, collective: Collective, case: Case, capacity: int
) -> Communicator:
    classes: dict[tuple[Method, Collective], type[Communicator]] = {
        ("bulk", "ag"): BulkAllGather,
        ("bulk", "rs"): BulkReduceScatter,
        ("pipeline", "rs"): PipelineReduceScatter,
        ("ring_exchange", "ag"): RingAllGather,
        ("ring_exchange", "rs"): RingReduceScatter,
    }
    assert backend.engine is not None
    spec = CommSpec(
        name,
        method,
        collective,
        (capacity, case.hidden),
        backend.tp,
        case.dtype,
        case.num_splits,
        aggregate=case.aggregate,
    )
    return classes[method, collective](spec, backend.engine)


def _data(case: Case, rank: int, *shape: int) -> torch.Tensor:
    """Random numbers that every rank can make again."""
    generator = torch.Generator().manual_seed(case.seed * 64 + rank)
    return torch.randn(shape, generator=generator).to(case.dtype)


def _gather(comm: Communicator, case: Case) -> torch.Tensor:
    """All-gather beside or inside a GEMM: the gathered ``[T, H]`` and the product, side by side."""
    local = _data(case, comm.rank, case.tokens // comm.tp, case.hidden)
    weight = _data(case, 40, case.inner, case.hidden)
    comm.poison()
    comm.copy_into_buffer(local, local_chunk=True)
    out = torch.full((case.tokens, case.inner), float("nan"), dtype=case.dtype)
    if isinstance(comm, RingAllGather):
        for rows, chunk in comm.all_gather_chunks():
            torch.mm(chunk, weight.t(), out=out[rows])
    else:
        assert isinstance(comm, BulkAllGather)
        with comm.all_gather():
            pass
        torch.mm(comm.get_buffer(), weight.t(), out=out)
    return torch.cat([comm.get_buffer().clone(), out], dim=1)


def _gather_reference(case: Case, rank: int, tp: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.cat([_data(case, r, case.tokens // tp, case.hidden) for r in range(tp)])
    weight = _data(case, 40, case.inner, case.hidden)
    product, bound = _product(whole, weight)
    return torch.cat([whole.double(), product], 1), torch.cat([torch.zeros_like(whole).double(), bound], 1)


def _scatter(comm: Communicator, case: Case) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of ``x @ weight.t()``."""
    x, weight = _operands(case, comm.rank)
    out = torch.full((case.tokens // comm.tp, case.hidden), float("nan"), dtype=case.dtype)
    comm.poison()
    if isinstance(comm, BulkReduceScatter):
        torch.mm(x, weight.t(), out=comm.get_buffer())
        with comm.reduce_scatter(out):
            pass
        return out
    assert isinstance(comm, PipelineReduceScatter | RingReduceScatter)
    for rows, columns, block in comm.reduce_scatter_chunks(out):
        torch.mm(x[rows], weight[columns].t(), out=block)
    return out


def _scatter_reference(case: Case, rank: int, tp: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = slice(rank * (case.tokens // tp), (rank + 1) * (case.tokens // tp))
    products = [_product(x[own], weight) for x, weight in (_operands(case, r) for r in range(tp))]
    total = sum((product for product, _ in products), torch.zeros(()))
    bound = sum((bound for _, bound in products), torch.zeros(()))
    return total, (bound + _unit(case.dtype) * total.abs()) * (1 + _unit(case.dtype))


def _operands(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _data(case, rank, case.tokens, case.inner), _data(case, 40 + rank, case.hidden, case.inner)


def _product(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x @ weight.t()`` in float64, and how far a result with float32 sums and one rounding may be off."""
    product = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    return product, magnitude * (x.shape[1] + 8) * _unit(torch.float32) + product.abs() * _unit(x.dtype)


def _unit(dtype: torch.dtype) -> float:
    """How far one rounding may be off, relatively."""
    return torch.finfo(dtype).eps / 2


# ---- layers ---------------------------------------------------------------------------------------------------


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
            if not error <= 8 * _unit(case.dtype)
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


def count_mismatches(
    group: Group, cases: int, layer_cases: int, seed: int, report: Callable[[str], None]
) -> dict[str, tuple[int, int]]:
    """Run everything; for each communicator and the layers: how many cases, and how many were wrong somewhere.

    ``report`` gets one text for each difference that this rank saw. Collective.
    """
    backend = case_backend(group)
    results = {}
    for method, collective in COMMUNICATORS:
        wrong = 0
        for case in random_cases(method, collective, group.size, cases, seed):
            wrong += _anywhere(group, run_case(backend, method, collective, case), report)
        results[f"{method} {collective}"] = (cases, wrong)
    backend.destroy()
    wrong = 0
    for layer_case in random_layer_cases(group.size, layer_cases, seed):
        wrong += _anywhere(group, run_layer_case(group, layer_case), report)
    results["layers"] = (layer_cases, wrong)
    return results


def _anywhere(group: Group, texts: list[str], report: Callable[[str], None]) -> bool:
    for text in texts:
        report(f"rank {group.rank}: {text}")
    return any(group.allgather(bool(texts), "comparing results"))

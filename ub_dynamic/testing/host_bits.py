# SPDX-License-Identifier: Apache-2.0
"""Host communicators of capacity C with active T against those made for exactly T: bit by bit.

Each case also compares with a float64 computation in a single process. All registered memory, staging
included, is filled with NaN before each operation, so that a read past what was written shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..backends.host import HostBackend
from ..backends.host.bulk import BulkAllGather, BulkReduceScatter
from ..backends.host.communicator import Communicator
from ..backends.host.pipeline import PipelineReduceScatter
from ..backends.host.ring import RingAllGather, RingReduceScatter
from ..groups import Group
from ..rules import token_rule
from ..shapes import Collective, CommSpec, Method

COMMUNICATORS: tuple[tuple[Method, Collective], ...] = (
    ("bulk", "ag"),
    ("bulk", "rs"),
    ("pipeline", "rs"),
    ("ring_exchange", "ag"),
    ("ring_exchange", "rs"),
)


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
    return total, (bound + rounding(case.dtype) * total.abs()) * (1 + rounding(case.dtype))


def _operands(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _data(case, rank, case.tokens, case.inner), _data(case, 40 + rank, case.hidden, case.inner)


def _product(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x @ weight.t()`` in float64, and how far a result with float32 sums and one rounding may be off."""
    product = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    return product, magnitude * (x.shape[1] + 8) * rounding(torch.float32) + product.abs() * rounding(x.dtype)


def rounding(dtype: torch.dtype) -> float:
    """How far one rounding to ``dtype`` may be off, relatively."""
    return torch.finfo(dtype).eps / 2

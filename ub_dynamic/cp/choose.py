# SPDX-License-Identifier: Apache-2.0
"""Which implementation and communication type to use for a batch: of what is exact and supported, the cheapest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..errors import UBDynamicError, UBShapeError, UBUnsupportedError
from ..metadata import MAX_CP_SEQUENCES
from ..packing import PackedBatch
from .capabilities import Capabilities, te_capabilities
from .cost import Attention, Cost, Links, estimate
from .pad_flag import check_tail
from .partition import Partition

Implementation = Literal["te", "ub_dynamic"]
CommType = Literal["p2p", "a2a", "a2a+p2p", "all_gather"]
Backend = Literal["fused", "flash2", "flash3", "flash4"]


@dataclass(frozen=True)
class Candidate:
    """One way: who computes it, TE's name of the communication, and the groups, ``inner * outer == cp``."""

    implementation: Implementation
    comm_type: CommType
    inner: int
    outer: int

    def __str__(self) -> str:
        return f"{self.implementation} {self.comm_type} (A = {self.inner}, P = {self.outer})"


@dataclass(frozen=True)
class CPPlan:
    """The choice, its cost, the other possible ways with theirs, cheapest first, and why each other way is not one."""

    candidate: Candidate
    cost: Cost
    ranking: tuple[tuple[Candidate, Cost], ...]
    refused: Mapping[Candidate, str]


@dataclass(frozen=True)
class CPProblem:
    """What is to be computed. ``heads``, ``kv_heads``, ``head_size``, ``itemsize``: of the whole model's attention on
    a rank before any all-to-all. ``mask``: TE's name. ``backend``: whose kernels TE would take. ``window``: sliding
    window; ``sink``: a softmax other than vanilla. ``rows``: packed rows over all CP ranks, where they come from
    elsewhere."""

    batch: PackedBatch
    heads: int
    kv_heads: int
    head_size: int = 128
    itemsize: int = 2
    mask: str = "padding_causal"
    partition: Partition = field(default_factory=Partition.zigzag)
    backend: Backend = "fused"
    window: bool = False
    sink: bool = False
    rows: int | None = None


def choose_cp_comm(
    problem: CPProblem,
    *,
    implementation: Implementation | None = None,
    comm_type: CommType | None = None,
    inner: int | None = None,
    capabilities: Capabilities | None = None,
    links: Links | None = None,
) -> CPPlan:
    """The cheapest way that is exact and supported, among those that the arguments leave open.

    ``inner``: ranks of the all-to-all. ``capabilities``: of the installed TE by default. ``links``: measured rates, by
    which ways are ranked in seconds; without them by bytes sent, the all-gather last, as nothing hides it. Where two
    cost the same TE comes first, and the all-to-all before the ring. Raises :class:`UBUnsupportedError` with every
    reason where nothing is left, and :class:`UBShapeError` for an uncovered tail.
    """
    check_tail(problem.batch.total_tokens, problem.rows)
    for name, value, allowed in (
        ("implementation", implementation, Implementation),
        ("comm_type", comm_type, CommType),
        ("backend", problem.backend, Backend),
    ):
        if value is not None and value not in get_args(allowed):
            raise UBShapeError(f"{name} = {value!r}: it must be one of {', '.join(map(repr, get_args(allowed)))}")
    found = te_capabilities() if capabilities is None else capabilities
    refused: dict[Candidate, str] = {}
    possible: list[tuple[Candidate, Cost]] = []
    for candidate in candidates(problem.batch.cp):
        if implementation not in (None, candidate.implementation) or comm_type not in (None, candidate.comm_type):
            continue
        if inner is not None and candidate.inner != inner:
            continue
        reason = refusal(problem, candidate, found)
        if reason is None:
            possible.append((candidate, _cost(problem, candidate, links)))
        else:
            refused[candidate] = reason
    if not possible:
        reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in refused.items())
        raise UBUnsupportedError(
            f"no way to compute this attention with cp = {problem.batch.cp}: {reasons or 'the arguments exclude all'}"
        )
    # Sorting is stable, so that candidates() decides between equals.
    possible.sort(key=_rank)
    return CPPlan(*possible[0], tuple(possible), refused)


def _rank(one: tuple[Candidate, Cost]) -> tuple[bool, float]:
    candidate, cost = one
    return (candidate.comm_type == "all_gather", cost.bytes) if cost.seconds is None else (False, cost.seconds)


def candidates(cp: int) -> Iterator[Candidate]:
    """All ways for ``cp`` ranks, preferred first."""
    for implementation in get_args(Implementation):
        for inner in (size for size in range(cp, 0, -1) if cp % size == 0):
            outer = cp // inner
            name: CommType = "a2a" if outer == 1 and cp > 1 else "p2p" if inner == 1 else "a2a+p2p"
            yield Candidate(implementation, name, inner, outer)
        if implementation == "te":
            yield Candidate("te", "all_gather", 1, cp)


def refusal(problem: CPProblem, candidate: Candidate, capabilities: Capabilities) -> str | None:
    """Why ``candidate`` is wrong or unsupported for ``problem``, or None."""
    try:
        problem.partition.check(problem.mask, problem.batch, candidate.implementation)
    except UBDynamicError as error:
        return str(error)
    heads = _heads_refusal(problem, candidate)
    if heads is not None:
        return heads
    return _te_refusal(problem, candidate, capabilities) if candidate.implementation == "te" else _own_refusal(problem)


def _own_refusal(problem: CPProblem) -> str | None:
    if problem.window or problem.sink:
        return f"{'a sliding window' if problem.window else 'a softmax other than vanilla'} is not implemented here"
    return None


def _heads_refusal(problem: CPProblem, candidate: Candidate) -> str | None:
    # TE asserts this for a2a, but not for a2a+p2p. Key heads are replicated here, not by TE.
    share = candidate.inner
    if problem.heads % share:
        return f"{problem.heads} heads are no multiple of the all-to-all's {share} ranks"
    if candidate.implementation == "te" and problem.kv_heads % share:
        return f"{problem.kv_heads} key heads are no multiple of the all-to-all's {share} ranks"
    return None


def _te_refusal(problem: CPProblem, candidate: Candidate, capabilities: Capabilities) -> str | None:
    comm, backend, padded = candidate.comm_type, problem.backend, problem.batch.has_padding
    generation = {"flash2": 2, "flash3": 3, "flash4": 4}.get(backend)
    checks: list[tuple[bool, str]] = [
        (capabilities.te is None, "Transformer Engine is not installed"),
        (not capabilities.takes(comm), f"Transformer Engine {capabilities.te} refuses packed sequences with {comm}"),
        (
            len(problem.batch.padded) > MAX_CP_SEQUENCES,
            f"TE's kernels keep boundaries in shared memory: at most {MAX_CP_SEQUENCES} sequences",
        ),
        (
            generation is not None and generation not in capabilities.flash,
            f"FlashAttention {generation} is not installed",
        ),
        (
            backend == "flash2" and padded,
            "FlashAttention 2 cannot take padding between sequences; lengths that are multiples of 2*cp need none",
        ),
        (
            backend == "flash2" and comm == "all_gather",
            "FlashAttention 2 takes no offsets apart from lengths; TE does not check, and results are wrong",
        ),
        (backend == "flash4" and comm == "a2a+p2p", "TE excludes FlashAttention 4 from a2a+p2p"),
        (
            backend == "flash3" and comm == "a2a+p2p" and padded,
            "FlashAttention 3 with padding in a2a+p2p is not covered by TE's own tests",
        ),
        (problem.window and comm not in ("a2a", "all_gather"), "a sliding window needs a2a or all_gather"),
        (problem.sink and (comm != "a2a" or backend != "fused"), "such a softmax needs a2a and fused attention"),
        (
            comm == "all_gather" and problem.partition.name != "zigzag",
            f"partition {problem.partition.name!r}: TE's all-gather puts keys in the zigzag's order",
        ),
    ]
    return next((reason for wrong, reason in checks if wrong), None)


def _cost(problem: CPProblem, candidate: Candidate, links: Links | None) -> Cost:
    sizes = Attention(
        problem.heads, problem.kv_heads, problem.head_size, problem.itemsize, problem.mask.endswith("causal")
    )
    gathered = candidate.comm_type == "all_gather"
    return estimate(problem.batch, sizes, candidate.inner, candidate.outer, gathered, links)

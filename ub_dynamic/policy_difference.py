# SPDX-License-Identifier: Apache-2.0
"""What ranks with different policies are told: at which T which GEMM is overlapped differently, and how on each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby

from .policy import AS_CONFIGURED, Policy, Runs

MOST_RUNS = 1024  # of one GEMM, that are sent: a message between ranks is small
_SHOWN = 3


def sent_runs(policy: Policy | None) -> Runs:
    """What a rank tells the others about its policy: the first runs of each GEMM."""
    return {} if policy is None else {gemm: runs[:MOST_RUNS] for gemm, runs in policy.runs().items()}


def differences(ranks: Mapping[int, Runs]) -> str:
    """Where the policies of these ranks differ, the first few ranges of T: GEMM, T and what each rank would do."""
    found = []
    for gemm in sorted({gemm for runs in ranks.values() for gemm in runs}):
        each = {rank: runs.get(gemm) or [(1, AS_CONFIGURED)] for rank, runs in ranks.items()}
        found += [f"{gemm} {where}: {_by_rank(values)}" for where, values in _differing(each)]
    if not found:
        return f"they differ after more than {MOST_RUNS} ranges of T"
    more = f"; and {len(found) - _SHOWN} more ranges" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _differing(ranks: Mapping[int, Sequence[tuple[int, str]]]) -> list[tuple[str, dict[int, str]]]:
    """Each range of T in which not all ranks do the same, and what they do."""
    known = min((runs[-1][0] for runs in ranks.values() if len(runs) == MOST_RUNS), default=None)  # less was sent
    borders = sorted({start for runs in ranks.values() for start, _ in runs if known is None or start <= known})
    starts = {rank: [start for start, _ in runs] for rank, runs in ranks.items()}

    def at(border: int) -> dict[int, str]:
        return {rank: runs[bisect_right(starts[rank], border) - 1][1] for rank, runs in ranks.items()}

    parts = [(values, next(same)) for values, same in groupby(borders, at)]
    found = []
    for index, (values, first) in enumerate(parts):
        if len(set(values.values())) > 1:
            last = parts[index + 1][1] - 1 if index + 1 < len(parts) else known
            found.append((_range(first, last), values))
    return found


def _range(first: int, last: int | None) -> str:
    if last is None:
        return f"at T >= {first}"
    return f"at T = {first}" if first == last else f"at T = {first} to {last}"


def _by_rank(values: Mapping[int, str]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in by_value.items()
    )

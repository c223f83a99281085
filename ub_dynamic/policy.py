# SPDX-License-Identifier: Apache-2.0
"""Which overlap each GEMM uses at which T: intervals of T, resolved once, looked up at every shape change."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from .errors import UBShapeError
from .overlap import OverlapConfig


class Choice(NamedTuple):
    """What one GEMM does at one T, and why."""

    config: OverlapConfig
    reason: str


Choices = Mapping[str, Choice]
ChooseOverlap = Callable[[str, int], OverlapConfig | None]
"""``(gemm, tokens)`` -> the configuration, or None for the one that ``ub_cfgs`` configured. The same on every rank."""


@dataclass(frozen=True)
class Policy:
    """From ``starts[i]`` tokens on, up to the next start, the GEMMs of ``stages[i]`` use the choices there.

    A GEMM is named by TE's communicator (``fc2_fprop``). One that a stage does not name is left as configured.
    """

    starts: tuple[int, ...]
    stages: tuple[Choices, ...]

    def __post_init__(self) -> None:
        if not self.starts or len(self.starts) != len(self.stages):
            raise UBShapeError(f"a policy has as many starts as stages, at least one, not {self.starts}")
        if any(after <= before for before, after in zip(self.starts, self.starts[1:], strict=False)):
            raise UBShapeError(f"the starts of a policy ascend; {self.starts} do not")

    def stage(self, tokens: int) -> int:
        """The index of the stage of T; a T below the first start is of the first stage."""
        return bisect_right(self.starts, tokens, 1) - 1

    def choices(self, tokens: int) -> Choices:
        """What every GEMM does at T."""
        return self.stages[self.stage(tokens)]

    def configurations(self) -> dict[str, tuple[OverlapConfig, ...]]:
        """Per GEMM, each configuration that some T may use, in the order of T."""
        found: dict[str, dict[OverlapConfig, None]] = {}
        for stage in self.stages:
            for gemm, choice in stage.items():
                found.setdefault(gemm, {})[choice.config] = None
        return {gemm: tuple(configs) for gemm, configs in found.items()}

    def digest(self) -> str:
        """A hash of the starts and configurations, which TP ranks compare once."""
        facts = [
            (start, sorted((gemm, choice.config.to_json()) for gemm, choice in stage.items()))
            for start, stage in zip(self.starts, self.stages, strict=True)
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def policy_of(choose: ChooseOverlap, gemms: Sequence[str], tokens: Iterable[int]) -> Policy:
    """``choose`` asked once for every GEMM at every valid T (``tokens``, ascending), equal neighbours merged."""
    starts: list[int] = []
    stages: list[Choices] = []
    for count in tokens:
        chosen = {}
        for gemm in gemms:
            config = choose(gemm, count)
            if config is None:
                continue
            if not isinstance(config, OverlapConfig):
                raise UBShapeError(
                    f"the policy returned {config!r} for {gemm} at T = {count}: it returns an OverlapConfig, or None "
                    "for the configured one"
                )
            chosen[gemm] = Choice(config, "chosen by the callable")
        if not stages or chosen != stages[-1]:
            starts.append(count)
            stages.append(MappingProxyType(chosen))
    return Policy(tuple(starts), tuple(stages))

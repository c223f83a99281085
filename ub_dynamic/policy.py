# SPDX-License-Identifier: Apache-2.0
"""Which overlap each GEMM uses at which T: intervals of T, resolved once, looked up at every shape change."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from .errors import UBShapeError
from .overlap import OverlapConfig


class Choice(NamedTuple):
    """What one GEMM does at one T, and why."""

    config: OverlapConfig
    reason: str


AS_CONFIGURED = "as configured"
Runs = dict[str, list[tuple[int, str]]]
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
        for start in self.starts:
            if type(start) is not int or start < 1:
                raise UBShapeError(f"starts of a policy hold {start!r}: each is a T, an int; the next valid value is 1")
        for before, after in zip(self.starts, self.starts[1:], strict=False):
            if after <= before:
                raise UBShapeError(
                    f"the starts of a policy ascend; {self.starts} do not: {after} follows {before}, and the next "
                    f"valid value is {before + 1}"
                )
        for start, stage in zip(self.starts, self.stages, strict=True):
            _check_stage(start, stage)

    def stage(self, tokens: int) -> int:
        """The index of the stage of T; a T below the first start is of the first stage."""
        return bisect_right(self.starts, tokens, 1) - 1

    def choices(self, tokens: int) -> Choices:
        """What every GEMM does at T."""
        return self.stages[self.stage(tokens)]

    def configurations(self) -> dict[str, tuple[OverlapConfig, ...]]:
        """Per GEMM, each configuration that some T may use, in the order of T; the same order on every rank."""
        found: dict[str, dict[OverlapConfig, None]] = {}
        for stage in self.stages:
            for gemm, choice in stage.items():
                found.setdefault(gemm, {})[choice.config] = None
        return {gemm: tuple(found[gemm]) for gemm in sorted(found)}

    def runs(self) -> Runs:
        """Per GEMM in order: from which T on it uses which configuration, in words, up to the next T."""
        found: Runs = {gemm: [] for gemm in self.configurations()}
        words: dict[OverlapConfig, str] = {}
        for start, stage in zip((1, *self.starts[1:]), self.stages, strict=True):
            for gemm, runs in found.items():
                choice = stage.get(gemm)
                text = AS_CONFIGURED if choice is None else words.setdefault(choice.config, str(choice.config))
                if not runs or runs[-1][1] != text:
                    runs.append((start, text))
        return found

    def digest(self) -> str:
        """A hash of what every GEMM does at every T, not of why; TP ranks compare it once."""
        return hashlib.sha256(json.dumps(self.runs()).encode()).hexdigest()[:16]


def _check_stage(start: int, stage: Any) -> None:
    where = f"the stage of a policy from T = {start} on"
    if not isinstance(stage, Mapping):
        raise UBShapeError(f'{where} is {stage!r}: it maps GEMMs to choices, as in {{"fc2_fprop": Choice(...)}}')
    for gemm, choice in stage.items():
        if not isinstance(gemm, str):
            raise UBShapeError(f'{where} names the GEMM {gemm!r}: it is a string, as in "fc2_fprop"')
        if not isinstance(choice, Choice) or not isinstance(choice.config, OverlapConfig):
            raise UBShapeError(
                f'{where} has {choice!r} for {gemm}: it is a Choice, as in Choice(OverlapConfig("none"), "why")'
            )


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

# SPDX-License-Identifier: Apache-2.0
"""A backend that records what the manager does to it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ub_dynamic.backends.names import overlap_specs, resolve_specs
from ub_dynamic.backends.protocol import OnOperand
from ub_dynamic.errors import UBUnsupportedError
from ub_dynamic.overlap import OverlapConfig


class FakeBackend:
    name = "fake"
    capacity_only: str | None = None
    auto_excludes_policy: str | None = None

    def __init__(self, capacity: tuple[int, int] = (128, 64), tp: int = 4, **cfgs: dict[str, object]) -> None:
        self.tp = tp
        made = resolve_specs(capacity, tp, torch.bfloat16, cfgs)
        self.specs = {spec.name: spec for spec in made if spec.method != "external"}
        self.skipped = {
            spec.name: "external communicators have no chunks" for spec in made if spec.method == "external"
        }
        self.notes: dict[str, str] = {}
        self.calls: list[object] = []
        self.followed: list[bool] = []
        self.cannot_follow: str | None = None
        self.why_busy: str | None = None
        self.on_operand: OnOperand | None = None
        self.objects = {name: object() for name in self.specs}

    def apply(self, tokens: int) -> None:
        self.calls.append(tokens)

    def apply_one(self, name: str, tokens: int) -> None:
        self.calls.append((name, tokens))

    def plan(self, choices: Mapping[str, OverlapConfig]) -> object:
        for gemm, config in choices.items():
            overlap_specs(self.specs, gemm, config)
        return dict(choices)

    def switch(self, plan: object) -> None:
        self.calls.append(plan)

    def follow_choices(self, follow: bool) -> None:
        if self.cannot_follow and follow:
            raise UBUnsupportedError(self.cannot_follow)
        self.followed.append(follow)

    def busy(self) -> str | None:
        return self.why_busy

    def give_up(self) -> None:
        """Nothing is filled here."""

    def make_ready(self, rule: object, board: object) -> None:
        return None

    def find(self, communicator: object) -> str | None:
        return next((name for name, made in self.objects.items() if made is communicator), None)

    def connect(self, on_operand: OnOperand | None) -> None:
        self.on_operand = on_operand

    def destroy(self) -> None:
        self.calls.append("destroy")

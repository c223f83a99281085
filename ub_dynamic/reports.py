# SPDX-License-Identifier: Apache-2.0
"""What a change of the active shape answers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

from .policy import Choice, Choices
from .shapes import Shape
from .stages import NOTHING_CHOSEN


class ShapeReport(NamedTuple):
    """What a call did: the active shape, the communicators that follow it, and the others with the reason.

    ``overlap``: how each GEMM that the policy names is overlapped at this T, and why; empty without a policy.
    """

    shape: Shape
    updated: tuple[str, ...]
    skipped: MappingProxyType[str, str]
    overlap: Choices = NOTHING_CHOSEN

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which know no mapping proxies."""
        return _report_of, (self.shape, self.updated, dict(self.skipped), dict(self.overlap))


def _report_of(
    shape: Shape, updated: tuple[str, ...], skipped: dict[str, str], overlap: dict[str, Choice]
) -> ShapeReport:
    return ShapeReport(shape, updated, MappingProxyType(skipped), MappingProxyType(overlap))

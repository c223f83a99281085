# SPDX-License-Identifier: Apache-2.0
"""What a rank says while it measures: rows, progress, and what it cannot measure. Only the first rank speaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


class Report:
    """Gives every event to ``say``; without one (another rank) it says nothing."""

    def __init__(self, say: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self._say = say
        self._said: set[str] = set()

    def row(self, row: Mapping[str, Any]) -> None:
        """Something that was measured."""
        self._write({"row": dict(row)})

    def progress(self, done: float, total: float, text: str) -> None:
        """``done`` of ``total`` parts; ``text``: what is measured now."""
        self._write({"progress": {"done": done, "total": total, "text": text}})

    def refused(self, reason: str) -> None:
        """A comparison that is left out, and why; said once."""
        if reason not in self._said:
            self._said.add(reason)
            self._write({"refused": reason})

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._say is not None:
            self._say(event)


class Budget:
    """The time that a rank has, cut into parts by weight; what one part leaves the following ones share."""

    def __init__(self, seconds: float, weights: Mapping[Any, float]) -> None:
        self._end = time.monotonic() + seconds
        self._left = dict(weights)

    def until(self, part: Any) -> float:
        """When ``part`` should end (``time.monotonic``), counted from now; each part is asked for once."""
        total = sum(self._left.values())
        share = self._left.pop(part) / total if total else 0.0
        now = time.monotonic()
        return now + share * max(0.0, self._end - now)

    @property
    def left(self) -> float:
        """Seconds until the end of all parts."""
        return self._end - time.monotonic()

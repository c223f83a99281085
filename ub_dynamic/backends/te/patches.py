# SPDX-License-Identifier: Apache-2.0
"""Replacing attributes of modules and classes so that all of it can be taken back, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import UBUnsupportedError

_ABSENT = object()


class Patches:
    """A stack of replaced attributes."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it was, what it is now

    def __bool__(self) -> bool:
        return bool(self._undo)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(original)``.

        Raises :class:`UBUnsupportedError` if ``owner`` itself has no such function.
        """
        original = vars(owner).get(name, _ABSENT)
        if original is _ABSENT or not callable(getattr(owner, name)):
            where = getattr(owner, "__name__", repr(owner))
            raise UBUnsupportedError(f"{where} has no function {name}: this version of it is not known")
        self._put(owner, name, original, make(getattr(owner, name)))

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, whether it exists or not."""
        self._put(owner, name, vars(owner).get(name, _ABSENT), value)

    def original(self, owner: Any, name: str) -> Any:
        """``owner.name`` as it was before these patches."""
        for patched, attribute, before, _ in self._undo:
            if patched is owner and attribute == name and before is not _ABSENT:
                return before
        return getattr(owner, name)

    def undo(self) -> list[str]:
        """Take everything back, last first.

        Returns the attributes that somebody else has replaced since. These are left alone: taking ours out from
        under theirs would take theirs away.
        """
        left = []
        while self._undo:
            owner, name, before, ours = self._undo.pop()
            if vars(owner).get(name) is not ours:
                left.append(f"{getattr(owner, '__name__', owner)}.{name}")
            elif before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        return left

    def _put(self, owner: Any, name: str, before: Any, value: Any) -> None:
        setattr(owner, name, value)
        self._undo.append((owner, name, before, value))

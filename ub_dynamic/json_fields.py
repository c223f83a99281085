# SPDX-License-Identifier: Apache-2.0
"""The fields of a JSON object from a file, each checked as it is taken: an error names field, value and rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .errors import UBShapeError, UBUnsupportedError, shown

WHOLE_MAXIMUM = 2**31 - 1
_LONGEST_US = 1e15


def check_whole(what: str, value: Any) -> None:
    """Raise :class:`UBShapeError` unless ``value`` is an int that a kernel's 32 bits hold, at least 1."""
    if type(value) is not int or not 1 <= value <= WHOLE_MAXIMUM:
        nearest = min(max(value, 1), WHOLE_MAXIMUM) if type(value) is int else 1
        raise UBShapeError(
            f"{what} = {shown(value)}: it is an int from 1 to {WHOLE_MAXIMUM}; the next valid value is {nearest}"
        )


def check_time(what: str, value: Any, *, zero: bool = False) -> None:
    """Raise :class:`UBShapeError` unless ``value`` is a number of microseconds, above 0 (``zero``: or 0)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN is not in the range; an int that no float holds is above it.
    if not number or not 0 <= value < _LONGEST_US or not (value or zero):
        least = "at least 0" if zero else "above 0"
        raise UBShapeError(f"{what} = {shown(value)}: it is a number of microseconds {least}, as in 12.5")


class Fields:
    """A JSON object, called ``where`` in errors. Every method raises :class:`UBUnsupportedError`."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise UBUnsupportedError(f"{where} is {shown(data)}: it is an object, as in {{}}")
        self._data, self.where = data, where

    def text(self, name: str) -> str:
        """A string."""
        return self._typed(name, str, 'a string, as in ""')

    def whole(self, name: str) -> int:
        """What :func:`check_whole` takes."""
        value = self._value(name)
        self._checked(check_whole, name, value)
        return int(value)

    def time(self, name: str, *, zero: bool = False) -> float:
        """What :func:`check_time` takes."""
        value = self._value(name)
        self._checked(check_time, name, value, zero=zero)
        return float(value)

    def texts(self, name: str) -> dict[str, str]:
        """An object of strings."""
        found = self.object(name)
        return {key: Fields(found, f"{name} of {self.where}").text(key) for key in found}

    def object(self, name: str) -> dict[str, Any]:
        """An object, unchecked inside."""
        return self._typed(name, dict, "an object, as in {}")

    def objects(self, name: str, one: str) -> Iterator[Fields]:
        """A list of objects; ``one``: what each is called."""
        for index, each in enumerate(self._typed(name, list, "a list, as in []")):
            yield Fields(each, f"{one} {index} of {self.where}")

    def is_null(self, name: str) -> bool:
        """Whether it is null, or not there."""
        return self._data.get(name) is None

    def _value(self, name: str) -> Any:
        if name not in self._data:
            raise UBUnsupportedError(f"{self.where} lacks {name!r}")
        return self._data[name]

    def _typed(self, name: str, kind: type, what: str) -> Any:
        value = self._value(name)
        if not isinstance(value, kind):
            raise UBUnsupportedError(f"{self.where}: {name} = {shown(value)}: it is {what}")
        return value

    def _checked(self, check: Any, name: str, value: Any, **options: Any) -> None:
        try:
            check(name, value, **options)
        except UBShapeError as error:
            raise UBUnsupportedError(f"{self.where}: {error}") from None

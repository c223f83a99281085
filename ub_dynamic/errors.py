# SPDX-License-Identifier: Apache-2.0
"""One exception class a kind of mistake; every one is a :class:`UBDynamicError`.

The standard base classes let callers who know nothing of this package catch them too:
a wrong shape is a ``ValueError``, a wait that ended is a ``TimeoutError``.
"""

from __future__ import annotations

import reprlib
from typing import Any


class UBDynamicError(Exception):
    """Base of every error that this package raises on purpose."""


class UBStateError(UBDynamicError, RuntimeError):
    """A call at the wrong time: before initialisation, during capture, in the middle of an overlap."""


class UBShapeError(UBDynamicError, ValueError):
    """A shape that no communicator could take, or an operand that does not match the active shape."""


class UBCapacityError(UBShapeError):
    """More tokens than the registered buffers, or than the 32-bit offsets of the kernels, can hold."""


class UBAlignmentError(UBShapeError):
    """A shape that fits but that a kernel cannot split: its rule is named, with the next valid value."""


class UBRankMismatchError(UBDynamicError, RuntimeError):
    """The ranks of a tensor-parallel group disagree; the text names every rank's value."""


class UBUnsupportedError(UBDynamicError, NotImplementedError):
    """Something that this installation, version or communicator cannot do; the text says why."""


class UBTimeoutError(UBDynamicError, TimeoutError):
    """A wait for another rank ended; the text names the wait and who is missing."""


_MOST_CHARACTERS = 160
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def shown(value: Any) -> str:
    """``value`` as it stands in an error's text: in a few words, whatever it is."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # holds an int that Python does not write out
        text = f"{type(value).__name__} with a number of too many digits"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."

# SPDX-License-Identifier: Apache-2.0
"""How long something may take: a positive, finite number of seconds, as an argument or in the environment."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from numbers import Real
from typing import Any

from .errors import UBStateError, shown


def check_seconds(name: str, value: Any) -> float:
    """``value``, numpy's included, if it is a positive, finite number; :class:`UBStateError` with its ``name`` else."""
    if type(value) is not bool and isinstance(value, Real):
        with suppress(OverflowError):  # of an int that no float can hold
            number = float(value)
            if 0 < number < math.inf:
                return number
    raise UBStateError(f"{name} = {shown(value)}: it is a positive, finite number of seconds, as 20 is")


def environment_seconds(variable: str, default: float) -> float:
    """What ``variable`` of the environment says, ``default`` without it; errors as :func:`check_seconds`."""
    value: Any = os.environ.get(variable, default)
    with suppress(ValueError):
        value = float(value)
    return check_seconds(variable, value)

# SPDX-License-Identifier: Apache-2.0
"""How long something may take: a positive, finite number of seconds, as an argument or in the environment."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from .errors import UBStateError, shown


def check_seconds(name: str, value: Any) -> float:
    """``value``, if it is a positive, finite number; :class:`UBStateError` with its ``name`` for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return value
    raise UBStateError(f"{name} = {shown(value)}: it is a positive, finite number of seconds, as 20 is")


def environment_seconds(variable: str, default: float) -> float:
    """What ``variable`` of the environment says, ``default`` without it; errors as :func:`check_seconds`."""
    value: Any = os.environ.get(variable, default)
    with suppress(ValueError):
        value = float(value)
    return check_seconds(variable, value)

# SPDX-License-Identifier: Apache-2.0
"""A file that a program will read: what has no end is refused before anything is read."""

from __future__ import annotations

from pathlib import Path

from .errors import UBUnsupportedError


def check_input(path: Path) -> None:
    """Raise :class:`UBUnsupportedError` where ``path`` is a device or a folder; links are followed.

    A pipe is fine, also one that is this process's ``/dev/stdin``. A path where nothing is, or that cannot be asked
    about, is left to who opens it.
    """
    try:
        known = not path.exists() or path.is_file() or path.is_fifo()
    except OSError:  # a name that is too long, a folder that must not be entered
        return
    if not known:
        raise UBUnsupportedError(f"{path} is no regular file and no pipe; name a file, or /dev/stdin behind a pipe")

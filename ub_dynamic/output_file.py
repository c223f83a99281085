# SPDX-License-Identifier: Apache-2.0
"""A file that a program will write: what is wrong with it is known before the work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import UBUnsupportedError


def check_regular(path: Path) -> None:
    """Raise :class:`UBUnsupportedError` where something is at ``path`` that is no regular file; links are followed."""
    if path.is_dir():
        raise UBUnsupportedError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise UBUnsupportedError(f"{path} is no regular file, and is left as it is; name another one")


def check_output(path: Path, *, anew: bool = True) -> None:
    """Raise :class:`UBUnsupportedError` where ``path`` cannot be written, or is there and no regular file.

    ``anew``: the file is made beside ``path`` and renamed, so that its folder must be writable.
    """
    try:
        check_regular(path)
        if path.exists() and not anew:
            with path.open("ab"):
                return
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(path) if anew else os.path.realpath(path))):
            pass
    except OSError as error:
        raise UBUnsupportedError(f"{path} cannot be written: {error.strerror or error}") from None

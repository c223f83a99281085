# SPDX-License-Identifier: Apache-2.0
"""A file that a program writes: what is wrong with it is known before the work, and it is written whole or not."""

from __future__ import annotations

import os
import tempfile
import uuid
from contextlib import suppress
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

    ``anew``: the file is made in the same folder and renamed (:func:`write_whole`), so the folder must be writable.
    """
    try:
        check_regular(path)
        if path.exists() and not anew:
            with path.open("ab"):
                return
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
            pass
    except OSError as error:
        raise UBUnsupportedError(f"{path} cannot be written: {error.strerror or error}") from None


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, or leave what is there; a link is followed. Nothing else is left in the folder.

    :class:`UBUnsupportedError` names the file where it is no regular one or cannot be written, as on a full disk.
    """
    check_regular(path)
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".ub_dynamic-{uuid.uuid4().hex}.tmp")  # the name of path may be as long as names can be
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(target)
    except OSError as error:
        raise UBUnsupportedError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it is gone where all went well
            partial.unlink()

# SPDX-License-Identifier: Apache-2.0
"""The files that commands write: one line and exit status 2 where one cannot be, if possible before any work."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ..errors import UBUnsupportedError
from ..output_file import check_output

_FORMATS = (".svg", ".png", ".pdf")


def refuse(title: str, reason: object) -> NoReturn:
    """Say in one line what is wrong with the input, and exit 2."""
    typer.echo(f"{title}: {reason}", err=True)
    raise typer.Exit(2)


def check_apart(**files: Path | None) -> None:
    """Refuse two options that name one file, of which at least one is written; ``files``: by option, without dashes."""
    seen: dict[str, str] = {}
    for name, path in files.items():
        if path is None:
            continue
        option, place = f"--{name}", os.path.realpath(path)
        if place in seen:
            refuse(option, f"{path} is the file of {seen[place]} as well, which would be lost; name another one")
        seen[place] = option


@contextmanager
def writing(title: str, path: Path) -> Iterator[None]:
    """What goes wrong while ``path`` is written, as a full disk, in one line."""
    try:
        yield
    except (OSError, UBUnsupportedError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        refuse(title, f"{path} cannot be written: {reason}")


def _picture(param: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is None:
        return None
    option = param.opts[0]
    if path.suffix not in _FORMATS:
        refuse(option, f"{path} ends in none of {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        refuse(option, "needs matplotlib: pip install 'ub_dynamic[plot]'")
    _check(option, path, anew=False)
    return path


def _json(param: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is None:
        return None
    option = param.opts[0]
    if path.suffix != ".json" or not re.fullmatch(r"[a-z0-9_]+", path.stem):
        refuse(option, f"{path.name}: name it with lower-case letters, digits and _, as in ops_x2.json")
    _check(option, path, anew=True)
    return path


def _check(option: str, path: Path, *, anew: bool) -> None:
    try:
        if not path.absolute().parent.is_dir():
            refuse(option, f"there is no folder {path.parent}")
        check_output(path, anew=anew)
    except UBUnsupportedError as error:
        refuse(option, error)
    except OSError as error:  # of a folder's name that is too long
        refuse(option, f"{path} cannot be written: {error.strerror or error}")


PictureFile = Annotated[
    Path | None, typer.Option(callback=_picture, help=f"Also draw it, to a {', '.join(_FORMATS)} file")
]
JsonFile = Annotated[Path | None, typer.Option("--json", callback=_json, help="Write a result file")]

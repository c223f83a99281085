# SPDX-License-Identifier: Apache-2.0
"""The option `--out` of the commands that draw: checked before anything is computed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

_FORMATS = (".svg", ".png", ".pdf")


def _check(out: Path | None) -> Path | None:
    if out is not None and out.suffix not in _FORMATS:
        raise typer.BadParameter(f"{out} ends in none of {', '.join(_FORMATS)}")
    if out is not None and not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}")
    if out is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install 'ub_dynamic[plot]'")
    return out


PictureFile = Annotated[
    Path | None, typer.Option(callback=_check, help=f"Also draw it, to a {', '.join(_FORMATS)} file")
]

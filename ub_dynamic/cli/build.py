# SPDX-License-Identifier: Apache-2.0
"""`build`: compile the native file of the TE backend ahead of time."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ..errors import UBDynamicError


def build(
    force: Annotated[bool, typer.Option("--force", help="Compile again even if the cache has it")] = False,
) -> None:
    """Compile the native file for this Python, torch and Transformer Engine into the cache of this user.

    Training does it on its first start; ahead of time helps where the machines that train have no compiler: build
    where there is one, on a file system that they share, and set UB_DYNAMIC_CACHE in both places.

    Exits 1, and says what to install, where it cannot be compiled.
    """
    from ..backends.te import build as builder

    start = time.monotonic()
    try:
        path = builder.build(force=force)
    except UBDynamicError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{path} ({time.monotonic() - start:.1f} s)")

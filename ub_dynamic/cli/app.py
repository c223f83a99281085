# SPDX-License-Identifier: Apache-2.0
"""All commands in one place: a command is a function in a file of its own, and one line here."""

from __future__ import annotations

import typer

from .advise import advise
from .bench import bench
from .build import build
from .doctor import doctor
from .layout import layout
from .one_gpu import one_gpu
from .schedule import schedule
from .trace import trace
from .tune import tune

app = typer.Typer(
    help="Variable token counts for tensor-parallel communication/GEMM overlap.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(advise)
app.add_typer(bench, name="bench")
app.command()(build)
app.command()(doctor)
app.command()(layout)
app.command(name="one-gpu")(one_gpu)
app.command()(schedule)
app.command()(trace)
app.command()(tune)

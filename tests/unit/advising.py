# SPDX-License-Identifier: Apache-2.0
"""The command ``advise``, as the tests call it."""

from __future__ import annotations

from typer.testing import CliRunner

from ub_dynamic.cli.app import app


def command(*words: object):  # type: ignore[no-untyped-def]
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["advise", *map(str, words)])

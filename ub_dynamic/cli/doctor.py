# SPDX-License-Identifier: Apache-2.0
"""`doctor`: what is installed, what works here, and what to install for the rest."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from .probes import Ability, Finding, abilities, examine

_MARKS = {"ok": "[green]ok[/]", "missing": "[yellow]--[/]", "broken": "[red]!![/]"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables")] = False,
) -> None:
    """Show what is installed, what works here, and what to install for the rest.

    Exits 1 when something is installed but broken; what is merely missing is no error.
    """
    findings = examine()
    able = abilities(findings)
    if as_json:
        typer.echo(json.dumps(_record(findings, able), indent=1))
    else:
        _show(findings, able)
    raise typer.Exit(1 if any(finding.state == "broken" for finding in findings) else 0)


def _record(findings: list[Finding], able: list[Ability]) -> dict[str, object]:
    return {
        "ub_dynamic": __version__,
        "findings": [asdict(finding) for finding in findings],
        "works": {ability.name: ability.works for ability in able},
        "in_the_way": {ability.name: list(ability.missing) for ability in able if not ability.works},
    }


def _table(title: str, columns: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, title=title, title_justify="left", title_style="bold")
    for _ in range(columns):
        table.add_column(overflow="fold")
    return table


def _show(findings: list[Finding], able: list[Ability]) -> None:
    console = Console()
    console.print(f"[bold]ub_dynamic {__version__}[/]")
    table = _table("Installed", 4)
    room = ""
    for finding in findings:
        first = finding.room if finding.room != room else ""
        table.add_row(first, finding.name, _MARKS[finding.state], escape(finding.found))
        room = finding.room
    console.print(table)
    table = _table("Works here", 3)
    for ability in able:
        needs = f"needs {', '.join(ability.missing)}" if ability.missing else ""
        table.add_row(ability.name, "[green]yes[/]" if ability.works else "[yellow]no[/]", needs)
    console.print(table)
    advice: dict[str, list[str]] = {}
    for finding in findings:
        if finding.advice:
            advice.setdefault(finding.advice, []).append(finding.name)
    if advice:
        console.print("[bold]For the rest[/]")
    for text, names in advice.items():
        console.print(f"{', '.join(names)}: {text}", markup=False, highlight=False)

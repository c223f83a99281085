# SPDX-License-Identifier: Apache-2.0
"""Write the tables of README.md and other pages from benchmarks/results/*.json; `--check` only compares.

The pages are README.md, benchmarks/README.md and those of docs/.

A table stands between two markers. `<!-- figures: NAME -->` shows a result's figures, one a line;
`<!-- rows: NAME column, column -->` shows its rows (all columns where none is named); both end with
`<!-- end -->`. A single figure inside a text is `<!-- figure: NAME KEY -->1.23<!-- end -->`. Between
`<!-- results -->` and `<!-- end -->` stand the figures of every result that there is, between `<!-- verified -->` and
`<!-- end -->` what each of them was measured on and when, and between `<!-- unmeasured -->` and `<!-- end -->` the
programs here whose result there is not. `<!-- picture: NAME PATH what it shows -->` is a picture drawn from a result,
or nothing while there is none.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_BLOCK = re.compile(
    r"(?P<open><!-- (?P<kind>results|verified|unmeasured|figures|rows|figure|picture)"
    r"(?:: (?P<name>[a-z0-9_]+)(?P<rest>[^>]*?))? -->)"
    r"(?P<body>.*?)(?P<close><!-- end -->)",
    re.DOTALL,
)


def render(text: str, results: Path) -> str:
    """`text` with every marked place filled anew. KeyError names a missing file, figure or column."""
    return _BLOCK.sub(lambda match: match["open"] + _fill(match, results) + match["close"], text)


def _fill(match: re.Match[str], results: Path) -> str:
    if match["kind"] == "results":
        return "".join(_section(json.loads(path.read_text())) for path in sorted(results.glob("*.json")))
    if match["kind"] == "verified":
        return _verified(results)
    if match["kind"] == "unmeasured":
        return _unmeasured(results)
    path = results / f"{match['name']}.json"
    if match["kind"] == "picture":
        return _picture(path, match["rest"].strip())
    if not path.exists():
        raise KeyError(f"{path.name} is not in {results.name}: run what writes it, or take the marker out")
    result = json.loads(path.read_text())
    rest = [word for word in re.split(r"[,\s]+", match["rest"]) if word]
    if match["kind"] == "figure":
        return _cell(_get(result["figures"], rest[0], path))
    if match["kind"] == "figures":
        return _figures(result)
    columns = rest or list(result["rows"][0])
    rows = [[_cell(_get(row, column, path)) for column in columns] for row in result["rows"]]
    return f"\n{_table(columns, rows)}\n\n{_origin(result)}\n"


def _picture(result: Path, words: str) -> str:
    if not result.exists():
        return ""
    picture, shows = words.split(" ", 1)
    return f"\n![{shows}]({picture})\n\n{_origin(json.loads(result.read_text()))}\n"


def _section(result: dict[str, Any]) -> str:
    return f"\n### {result['name']}\n{_figures(result)}"


def _figures(result: dict[str, Any]) -> str:
    rows = [[key, _cell(value)] for key, value in result["figures"].items()]
    return f"\n{_table(['figure', 'value'], rows)}\n\n{_origin(result)}\n"


def _verified(results: Path) -> str:
    """A line for every result: what its program says it measures, and where and when it did."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    rows = [
        [
            f"`{result['name']}.json`",
            _says(_program(result["command"])),
            result["mode"],
            result["machine"],
            ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
            f"{result['date'][:10]}, {result['commit'][:12]}",
        ]
        for result in sorted(found, key=lambda result: (result["mode"] == "cpu-mpi", result["name"]))
    ]
    return f"\n{_table(['result', 'what was measured', 'mode', 'machine', 'versions', 'date, commit'], rows)}\n"


def _unmeasured(results: Path) -> str:
    """A line for every program whose docstring says that it writes a result which is not there, under any name."""
    there = {path.name for path in results.glob("*.json")}
    ran = {_program(json.loads(path.read_text())["command"]) for path in results.glob("*.json")}
    rows = []
    for program in sorted(HERE.glob("[!_]*.py")):
        written = set(re.findall(r"\b([a-z0-9_]+\.json)\b", ast.get_docstring(ast.parse(program.read_text())) or ""))
        if written and not written & there and program not in ran:
            rows.append([f"`{program.name}`", _says(program)])
    return f"\n{_table(['program', 'what it would measure'], rows)}\n"


def _program(command: str) -> Path | None:
    """The program that a command line starts, if it is a file of the checkout."""
    named = [word for word in command.split() if word.endswith(".py")]
    path = HERE.parent / named[-1] if named else None
    return path if path is not None and path.exists() else None


def _says(program: Path | None) -> str:
    """The first sentences of a program's docstring, without the one that names its result."""
    if program is None:
        return ""
    text = (ast.get_docstring(ast.parse(program.read_text())) or "").split("\n\n")[0]
    return re.sub(r" ?Writes [\w.]+\.json[^.]*\.?", "", " ".join(text.split()))


def _get(values: dict[str, Any], key: str, path: Path) -> Any:
    if key not in values:
        raise KeyError(f"{path.name} has no {key!r}; it has {', '.join(values)}")
    return values[key]


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _origin(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"`{result['command']}` · {result['mode']} · {result['machine']} · {versions} · "
        f"commit {result['commit'][:12]} · {result['date'][:10]}"
    )


def pages() -> list[Path]:
    """Every page that may have tables."""
    return [HERE / "README.md", HERE.parent / "README.md", *sorted((HERE.parent / "docs").rglob("*.md"))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the tables are not current")
    parser.add_argument("files", nargs="*", type=Path, default=pages())
    options = parser.parse_args(arguments)
    if (HERE / "results" / "te_step.json").exists() and not options.check:
        import draw_steps  # needs matplotlib

        draw_steps.main([])
    stale = []
    for path in options.files:
        old = path.read_text()
        new = render(old, HERE / "results")
        if new != old:
            stale.append(path)
            if not options.check:
                path.write_text(new)
    if stale and options.check:
        print(
            f"not current: {', '.join(map(str, stale))}; run python benchmarks/make_tables.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

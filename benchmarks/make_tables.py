# SPDX-License-Identifier: Apache-2.0
"""Write the tables of README.md and benchmarks/README.md from benchmarks/results/*.json; `--check` only compares.

A table stands between two markers. `<!-- figures: NAME -->` shows a result's figures, one a line;
`<!-- rows: NAME column, column -->` shows its rows (all columns where none is named); both end with
`<!-- end -->`. A single figure inside a text is `<!-- figure: NAME KEY -->1.23<!-- end -->`. Between
`<!-- results -->` and `<!-- end -->` stand the figures of every result that there is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_BLOCK = re.compile(
    r"(?P<open><!-- (?P<kind>results|figures|rows|figure)(?:: (?P<name>[a-z0-9_]+)(?P<rest>[^>]*?))? -->)"
    r"(?P<body>.*?)(?P<close><!-- end -->)",
    re.DOTALL,
)


def render(text: str, results: Path) -> str:
    """`text` with every marked place filled anew. KeyError names a missing file, figure or column."""
    return _BLOCK.sub(lambda match: match["open"] + _fill(match, results) + match["close"], text)


def _fill(match: re.Match[str], results: Path) -> str:
    if match["kind"] == "results":
        return "".join(_section(json.loads(path.read_text())) for path in sorted(results.glob("*.json")))
    path = results / f"{match['name']}.json"
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


def _section(result: dict[str, Any]) -> str:
    return f"\n### {result['name']}\n{_figures(result)}"


def _figures(result: dict[str, Any]) -> str:
    rows = [[key, _cell(value)] for key, value in result["figures"].items()]
    return f"\n{_table(['figure', 'value'], rows)}\n\n{_origin(result)}\n"


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the tables are not current")
    parser.add_argument("files", nargs="*", type=Path, default=[HERE / "README.md", HERE.parent / "README.md"])
    options = parser.parse_args(arguments)
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

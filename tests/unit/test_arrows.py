# SPDX-License-Identifier: Apache-2.0
"""The rooms' arrows go down only, importing the package costs nothing it does not need, and files say their licence."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ub_dynamic"

# Room -> the rooms that it may import. A room is a file or folder of the package; what stands higher knows what
# stands lower, never the other way round.
BASE = {"errors"}
ARITHMETIC = BASE | {"shapes", "rules"}
RANKS = BASE | {"seconds", "ranks", "groups", "board"}
PACKED = ARITHMETIC | {"metadata", "packing_rules", "packing", "planning"}
BACKEND = ARITHMETIC | RANKS | {"overlap", "backends.protocol", "backends.names", "backends.quantization"}
ARROWS = {
    "errors": set(),
    "seconds": BASE,
    "modes": set(),
    "batches": BASE,
    "shapes": BASE,
    "rules": ARITHMETIC,
    "overlap": BASE,
    "policy": BASE | {"overlap"},
    "policy_difference": BASE | {"policy"},
    "json_fields": BASE,
    "input_file": BASE,
    "output_file": BASE,
    "tuning_table": BASE | {"overlap", "policy", "json_fields", "input_file", "output_file", "modes", "backends.names"},
    "metadata": BASE,
    "packing_rules": BASE | {"shapes"},
    "packing": ARITHMETIC | {"metadata", "packing_rules"},
    "planning": PACKED,
    "ranks": BASE,
    "groups": RANKS,
    "board": RANKS,
    "readiness": RANKS,
    "backends": set(),
    "backends.protocol": ARITHMETIC | {"overlap"},
    "backends.names": ARITHMETIC | {"overlap"},
    "backends.quantization": ARITHMETIC | {"backends.names"},
    "backends.host": BACKEND | {"input_file"},
    "backends.te": BACKEND | PACKED,
    "stages": BASE | {"overlap", "policy", "backends.protocol"},
    "scopes": BASE | {"shapes"},
    "valid_shapes": ARITHMETIC,
    "reports": {"policy", "shapes", "stages"},
    "manager": ARITHMETIC
    | RANKS
    | {"batches", "packing", "policy", "reports", "scopes", "stages", "valid_shapes", "backends.protocol"},
    "cp": PACKED | RANKS,
    "pipeline": PACKED | RANKS | {"batches"},
    "agreement": BACKEND | {"manager", "modes", "policy", "policy_difference", "tuning_table"},
    "api": BACKEND
    | {"agreement", "manager", "readiness", "reports", "scopes", "packing", "backends.host", "backends.te"},
    "advise": PACKED | {"input_file", "overlap", "policy", "tuning_table", "backends.protocol", "backends.names"},
    "integrations": PACKED | {"api", "cp", "backends.te"},
    "bench": None,  # measures everything
    "testing": None,  # tests know everything
    "cli": None,
    "__init__": {"api", "errors", "manager", "reports", "scopes", "packing", "planning"},
    "__main__": {"cli"},
}
LAZY = ["transformer_engine", "transformer_engine_torch", "mpi4py", "matplotlib", "typer", "rich", "numpy"]

# Put together here, so that this file passes its own check.
MACHINE_PATHS = re.compile("|".join([r"/wo" + r"rk/", r"/fa" + r"rm/", r"/ro" + r"ot/", r"/ho" + r"me/"]))


def room_of(module: str) -> str:
    """`backends.te.build` -> `backends.te`; `cp.grid` -> `cp`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "backends" else parts[0]


def module_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports anywhere in it, named without `ub_dynamic.`."""
    here = ["ub_dynamic", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("ub_dynamic.") for name in names if name.startswith("ub_dynamic."))


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_go_down_only(path: Path) -> None:
    room = room_of(module_of(path))
    assert room in ARROWS, f"a new room: say in ARROWS what {room} may import"
    allowed = ARROWS[room]
    if allowed is None:
        return
    for name in imports(path):
        target = room_of(name)
        if target not in ARROWS:  # a name of ub_dynamic/__init__.py
            target = "__init__"
        assert target == room or target in allowed, f"{module_of(path)} imports {name}; allowed: {sorted(allowed)}"


@pytest.mark.parametrize("module", ["ub_dynamic", "ub_dynamic.cp", "ub_dynamic.pipeline", "ub_dynamic.packing"])
def test_import_needs_only_torch(module: str) -> None:
    """In a process of its own, where what torch itself imports does not count."""
    code = (
        f"import sys, torch; before = set(sys.modules); import {module}\n"
        f"print(*[name for name in {LAZY} if name in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def text_files() -> list[Path]:
    folders = ("ub_dynamic", "tests", "examples", "benchmarks", "docs", ".ci")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found += [path for path in ROOT.iterdir() if path.is_file() and path.name not in ("LICENSE", ".git")]
    binary = (".png", ".pdf", ".so")
    made = ("__pycache__", ".mypy_cache")
    return sorted(p for p in found if p.suffix not in binary and not set(made) & set(p.parts))


def test_every_source_file_says_its_licence() -> None:
    comment = {".py": "#", ".cpp": "//", ".h": "//", ".c": "//"}
    for path in text_files():
        if path.suffix in comment:
            first = path.read_text().split("\n", 1)[0]
            assert first == f"{comment[path.suffix]} SPDX-License-Identifier: Apache-2.0", path


def test_every_python_file_says_its_idea() -> None:
    for path in sources():
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_no_file_names_a_machine_path() -> None:
    for path in text_files():
        match = MACHINE_PATHS.search(path.read_text(errors="replace"))
        assert match is None, f"{path}: {match and match[0]}"

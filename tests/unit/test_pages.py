# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ know every error, command, setting and method, and are built without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ub_dynamic
from ub_dynamic.backends.names import GEMM_METHODS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def table(page: str, first: str) -> list[list[str]]:
    """The rows of the table of a page whose first column has this title."""
    text = (DOCS / page).read_text()
    body = text.split(f"| {first} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_every_error_is_explained() -> None:
    classes = {name for name in ub_dynamic.__all__ if name.endswith("Error")} - {"UBDynamicError"}
    assert {row[0].strip("`") for row in table("errors.md", "class")} == classes
    for name, base, *_ in table("errors.md", "class"):
        bases = [each.__name__ for each in getattr(ub_dynamic, name.strip("`")).__mro__]
        assert base.strip("`") in bases


def test_every_method_of_a_gemm_is_named() -> None:
    shown = {}
    for gemms, methods in table("tuning.md", "GEMM"):
        shown |= {gemm.strip(" `"): tuple(methods.split(", ")) for gemm in gemms.split(",")}
    assert shown == GEMM_METHODS


def test_every_setting_is_named() -> None:
    files = [path for kind in ("*.py", "*.h") for path in (ROOT / "ub_dynamic").rglob(kind)]
    sources = " ".join(path.read_text() for path in files)
    named = {row[0].strip("`") for row in table("cluster.md", "variable")}
    assert named <= set(re.findall(r"UB_DYNAMIC_[A-Z_]+", sources))
    assert {"UB_DYNAMIC_TIMEOUT", "UB_DYNAMIC_CACHE", "UB_DYNAMIC_FORCE_TABLE"} <= named


def test_texts_of_errors_are_real() -> None:
    """What errors.md says that a text contains, some text contains."""
    files = [path for kind in ("*.py", "*.h") for path in (ROOT / "ub_dynamic").rglob(kind)]
    sources = " ".join(path.read_text() for path in files)
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # literals that are joined
    for text, *_ in table("errors.md", "text contains"):
        for part in text.strip("`").split("..."):
            words = re.sub(r" T = ?$", "", part.strip())
            assert words in sources, words


@pytest.mark.skipif(find_spec("griffe") is None, reason="needs mkdocstrings: pip install 'ub_dynamic[docs]'")
def test_docstrings_become_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from docstrings import to_markdown

    text = "See :class:`~a.b.C` and :func:`f`::\n\n    code\n\n=== ===\na   b\n=== ===\n1   2\n=== ===\n"
    assert to_markdown(text) == (
        "See `C` and `f`:\n\n    code\n\n```text\n=== ===\na   b\n=== ===\n1   2\n=== ===\n```\n"
    )


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs mkdocs: pip install 'ub_dynamic[docs]'")
def test_pages_are_built(tmp_path: Path) -> None:
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "initialize_ub" in (tmp_path / "api" / "ub_dynamic" / "index.html").read_text()

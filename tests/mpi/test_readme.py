# SPDX-License-Identifier: Apache-2.0
"""Every python block of README.md runs as it stands: on two ranks, or as its first line says.

A block says more about itself behind the language: ```` ```python ranks=4 ```` starts four ranks,
```` ```python gpu ```` and ```` ```python te ```` need what the marks of those names need.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ub_dynamic.testing.launch import run_ranks

README = Path(__file__).resolve().parents[2] / "README.md"
_BLOCK = re.compile(r"^```python(?P<words>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_RANKS = re.compile(r"ranks=([1-9]\d*)")


def blocks() -> list[object]:
    """(code, ranks) of every block, marked as its words say, named by its line."""
    text = README.read_text()
    found = []
    for block in _BLOCK.finditer(text):
        words = block["words"].split()
        ranks = next((int(match[1]) for word in words if (match := _RANKS.fullmatch(word))), 2)
        unknown = [word for word in words if word not in ("gpu", "te") and not _RANKS.fullmatch(word)]
        assert not unknown, f"README.md: a python block says {unknown}; known are ranks=N, gpu and te"
        marks = [getattr(pytest.mark, word) for word in words if word in ("gpu", "te")]
        line = text.count("\n", 0, block.start()) + 1
        found.append(pytest.param(block["code"], ranks, marks=[pytest.mark.mpi, *marks], id=f"line{line}"))
    return found


@pytest.mark.parametrize(("code", "ranks"), blocks())
def test_block_runs(tmp_path: Path, code: str, ranks: int) -> None:
    program = tmp_path / "block.py"
    program.write_text(code)
    run_ranks(program, ranks, timeout=120).check()


def test_first_block_runs_under_torchrun_too(tmp_path: Path) -> None:
    program = tmp_path / "block.py"
    program.write_text(_BLOCK.findall(README.read_text())[0][1])
    run_ranks(program, 2, launcher="torchrun", timeout=120).check()


def test_first_block_is_short() -> None:
    lines = [line for line in _BLOCK.findall(README.read_text())[0][1].splitlines() if line.strip()]
    assert len(lines) <= 12


def test_files_that_are_named_exist() -> None:
    text = README.read_text()
    named = re.findall(r"`((?:ub_dynamic|examples|benchmarks)/[\w/]+\.\w+)`", text) + re.findall(
        r"\]\(([\w/.]+)\)", text
    )
    assert named
    missing = [path for path in named if not (README.parent / path).exists()]
    assert not missing

# SPDX-License-Identifier: Apache-2.0
"""Every python and bash block of docs/ runs as it stands, or says why it is not run here."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from pages import Block, blocks, starts, write_programs

from ub_dynamic.testing.launch import RankRun, launch_env, run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize(("page", "together"), [start for page in PAGES for start in starts(page)])
def test_blocks_run(tmp_path: Path, page: Path, together: list[Block]) -> None:
    for other in blocks(page):
        if other.file:
            (tmp_path / other.file).write_text(other.code)
    if together[0].language == "bash":
        _run_bash(together[0].code, tmp_path)
        return
    program, *paths = write_programs(together, tmp_path)
    run_ranks(program, together[0].ranks, paths, timeout=120, cwd=tmp_path).check()


def _run_bash(code: str, folder: Path) -> None:
    """In a folder that looks like the checkout, with this Python's programs first."""
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    env = {**launch_env("mpirun"), "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    with RankRun(["bash", "-euo", "pipefail", "-c", code], env, folder) as run:
        run.wait(300).check()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_named_exists(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:ub_dynamic|examples|benchmarks|docs|tests)/[\w/]+\.\w+)`", text)
    assert not [path for path in named if not (ROOT / path).exists()]
    linked = re.findall(r"\]\((?!https?:)([\w/.-]+?)(?:#[\w-]+)?\)", text)
    assert not [path for path in linked if not (page.parent / path).exists()]

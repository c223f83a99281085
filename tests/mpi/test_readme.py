# SPDX-License-Identifier: Apache-2.0
"""Every python block of README.md runs as it stands: on two ranks, or as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import Block, blocks, starts, write_programs

from ub_dynamic.testing.launch import run_ranks

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = [block for block in blocks(README) if block.language == "python"]


@pytest.mark.parametrize(("page", "together"), starts(README))
def test_blocks_run(tmp_path: Path, page: Path, together: list[Block]) -> None:
    program, *paths = write_programs(together, tmp_path)
    run_ranks(program, together[0].ranks, paths, timeout=120).check()


def test_first_block_runs_under_torchrun_too(tmp_path: Path) -> None:
    program = tmp_path / "block.py"
    program.write_text(BLOCKS[0].code)
    run_ranks(program, 2, launcher="torchrun", timeout=120).check()


def test_first_block_is_short() -> None:
    assert len([line for line in BLOCKS[0].code.splitlines() if line.strip()]) <= 12


def test_files_that_are_named_exist() -> None:
    text = README.read_text()
    named = re.findall(r"`((?:ub_dynamic|examples|benchmarks|docs)/[\w/]+\.\w+)`", text) + re.findall(
        r"\]\(([\w/.-]+)\)", text
    )
    assert named
    missing = [path for path in named if not (README.parent / path).exists()]
    assert not missing

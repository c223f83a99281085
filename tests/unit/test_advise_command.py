# SPDX-License-Identifier: Apache-2.0
"""`python -m ub_dynamic advise` shows all that the advisor knows, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from advising import command


@pytest.fixture
def some(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, [700, 20, 1500, 300, 64, 900])))
    return path


def test_command_shows_all(some: Path) -> None:
    words = ["--capacity", 2048, "--tp", 2, "--hidden", 1024, "--plan", "fixed", "--documents", 2]
    result = command(some, *words, "--buckets", "2")
    assert result.exit_code == 0, result.output
    for text in ("6 documents, 3,484 tokens in 3 microbatches", "2 best buckets", "exact T", "MiB on each rank"):
        assert text in result.output
    record = json.loads(command(some, *words, "--json").output)
    assert record["microbatches"] == 3
    assert (record["tokens"]["q50"], record["tokens"]["q100"]) == (964, 1800)
    assert record["strategies"][-1]["tokens"] == 720 + 1800 + 964
    assert record["advice"]


@pytest.mark.parametrize(("cp", "column"), [(1, "tokens"), (2, "rows of a CP rank")])
def test_the_column_says_whose_rows_it_counts(some: Path, cp: int, column: str) -> None:
    output = command(some, "--capacity", 2048, "--cp", cp).output
    (heads,) = [line for line in output.splitlines() if "CUDA graphs" in line]
    assert column in heads
    assert ("T of a microbatch on a CP rank" in output) == (cp == 2)
    assert ("tokens" in heads) == (cp == 1)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_command_draws(some: Path, suffix: str) -> None:
    out = some.with_suffix(f".{suffix}")
    assert command(some, "--capacity", 2048, "--out", out).exit_code == 0
    assert out.read_bytes()[:5] == (b"<?xml" if suffix == "svg" else b"\x89PNG\r")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--capacity", "2047", "--tp", "2"], "the next valid value is 2048"),
        (["--capacity", "2048", "--buckets", "a"], "not a list of numbers"),
        (["--capacity", "2048", "--buckets", "0"], "buckets = 0"),
        (["--capacity", "2048", "--plan", "any"], "'packed' or 'fixed'"),
        (["--capacity", "2048", "--table", "gone.json"], "gone.json"),
    ],
)
def test_command_says_what_is_wrong(some: Path, words: list[str], says: str) -> None:
    result = command(some, *words)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_command_names_the_line(some: Path) -> None:
    some.write_text("3\nx\n")
    result = command(some, "--capacity", 64)
    assert result.exit_code == 2
    assert "lengths.txt, line 2: 'x' is no length" in result.output

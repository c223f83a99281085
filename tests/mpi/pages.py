# SPDX-License-Identifier: Apache-2.0
"""The code blocks of a page: what they say, and what they need to run.

A block says more about itself in words: behind the language (README.md), or in a comment on the line before it
(`<!-- run: ranks=1 -->`, which pages of docs/ need, since their builder takes no other words there).

| word | meaning |
| --- | --- |
| `ranks=N` | a python block runs on N ranks (2 if it says nothing); 0: a bash block of the page starts it |
| `gpu`, `te` | it needs what the marks of those names need |
| `file=NAME` | the bash blocks of the page find it as a file of this name |
| `skip: why` | it is not run; the rest of the comment says why |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

_BLOCK = re.compile(
    r"(?:^<!-- run: (?P<comment>[^\n]*) -->\n)?^```(?P<language>python|bash)(?P<words>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block, at a line of its page. ``marks``: names of pytest marks; ``skip``: why it is not run, if it is not."""

    line: int
    language: str
    code: str
    ranks: int = 2
    marks: tuple[str, ...] = ()
    file: str | None = None
    skip: str | None = None

    @property
    def start(self) -> object:
        """What blocks have in common that run one after another in the same processes; for bash, itself alone."""
        alone = self.line if self.language == "bash" or self.skip else 0
        return self.language, self.ranks, self.marks, alone


def starts(page: Path) -> list[object]:
    """Pytest parameters (page, blocks), with their marks, named by page and lines: blocks that share one start."""
    found: dict[object, list[Block]] = {}
    for block in blocks(page):
        if block.language == "bash" or block.ranks > 0:
            found.setdefault(block.start, []).append(block)
    return [_parameter(page, together) for together in found.values()]


def _parameter(page: Path, together: list[Block]) -> object:
    marks = [pytest.mark.mpi, *(getattr(pytest.mark, name) for name in together[0].marks)]
    if together[0].skip:
        marks.append(pytest.mark.skip(reason=together[0].skip))
    lines = ",".join(str(block.line) for block in together)
    return pytest.param(page, together, marks=marks, id=f"{page.stem}-line{lines}")


def write_programs(together: list[Block], folder: Path) -> list[str]:
    """A file that runs python blocks one after another, and its arguments: a file for each, named by its line."""
    runner = folder / "blocks.py"
    runner.write_text("import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')\n")
    paths = [folder / f"line{block.line}.py" for block in together]
    for path, block in zip(paths, together, strict=True):
        path.write_text(block.code)
    return [str(runner), *map(str, paths)]


def blocks(page: Path) -> list[Block]:
    """Every python and bash block of ``page``; AssertionError for a word that means nothing."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        said = f"{match['words']} {match['comment'] or ''}".strip()
        found.append(_block(match, line, said, page.name))
    fences = len(re.findall(r"^```(?:python|bash)", text, re.MULTILINE))
    assert len(found) == fences, f"{page.name}: {fences} blocks begin, {len(found)} of them can be read"
    return found


def _block(match: re.Match[str], line: int, said: str, page: str) -> Block:
    language, code = match["language"], match["code"]
    if said.startswith("skip: "):
        return Block(line, language, code, skip=said.removeprefix("skip: "))
    ranks, marks, file = 2, [], None
    for word in said.split():
        if re.fullmatch(r"ranks=\d+", word):
            ranks = int(word.partition("=")[2])
        elif re.fullmatch(r"file=[\w.]+", word):
            file = word.partition("=")[2]
        elif word in ("gpu", "te"):
            marks.append(word)
        else:
            raise AssertionError(f"{page}, line {line}: {word!r} means nothing; see tests/mpi/pages.py")
    return Block(line, language, code, ranks, tuple(marks), file)

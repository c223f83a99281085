# SPDX-License-Identifier: Apache-2.0
"""Docstrings are written for a terminal, with Sphinx's roles; this makes Markdown of them for the API pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?([^`]+)`")
_TABLE = re.compile(r"(?:^|(?<=\n\n))(=+(?: +=+)+\n(?:.+\n?)+)")
_LITERAL = re.compile(r"::\n(?=\n +\S)")


def to_markdown(text: str) -> str:
    """Roles become names in code, a table of ``===`` a block of text, and ``::`` the colon before a code block."""
    text = _ROLE.sub(lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    text = _TABLE.sub(lambda match: f"```text\n{match[1].rstrip()}\n```\n", text)
    return _LITERAL.sub(":\n", text)


class Docstrings(griffe.Extension):
    """Applies :func:`to_markdown` to everything that is loaded."""

    def on_object(self, *, obj: griffe.Object, **more: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)

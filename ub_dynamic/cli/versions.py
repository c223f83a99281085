# SPDX-License-Identifier: Apache-2.0
"""Which version of a package is installed, and which ones this package's own metadata asks for."""

from __future__ import annotations

import re
from importlib import metadata


def installed(name: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def needed(name: str) -> str:
    """What this package asks for, as in ``>=1.6,<2``; empty where it is not installed or asks for nothing."""
    try:
        lines = metadata.requires("ub_dynamic") or []
    except metadata.PackageNotFoundError:
        return ""
    found = (re.fullmatch(rf"{re.escape(name)}(?:\[.*?\])?\s*([<>=!~][^;]*)(;.*)?", line) for line in lines)
    return next((match[1].strip() for match in found if match), "")


def satisfies(version: str, range_: str) -> bool:
    """Whether ``version`` lies in a range of :func:`needed`; pre-releases and local builds (2.13.0+cpu) count.

    True without `packaging`: nobody can tell.
    """
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True
    return SpecifierSet(range_).contains(version, prereleases=True)

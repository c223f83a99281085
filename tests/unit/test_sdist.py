# SPDX-License-Identifier: Apache-2.0
"""An sdist holds the whole checkout, and what is installed from it is the whole package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
FILES += ("constraints.txt", "mkdocs.yml")
FOLDERS = ("ub_dynamic", "tests", "examples", "benchmarks", "docs", ".ci")
MADE = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache", "*.egg-info")


def setuptools_is_new_enough() -> bool:
    try:
        return int(metadata.version("setuptools").split(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        return False


def in_folder(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(not setuptools_is_new_enough(), reason="needs setuptools 77 to build without the network")
def test_sdist_and_what_is_installed_from_it(tmp_path: Path) -> None:
    source, built, unpacked = (tmp_path / name for name in ("source", "built", "unpacked"))
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=MADE)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    wanted = in_folder(source)

    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(built)!r})"
    built.mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=300)
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(unpacked, filter="data")
    (checkout,) = unpacked.iterdir()
    assert wanted <= in_folder(checkout)

    words = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(built), str(checkout)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=300)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        installed = {name for name in file.namelist() if name.startswith("ub_dynamic/")}
    assert installed == {name for name in wanted if name.startswith("ub_dynamic/")}

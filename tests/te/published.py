# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine as PyPI has it, version by version: what pip fetches once into the cache.

The source package of TE's torch binding carries the same headers as the wheel and is a thousandth of its size; the
wheel of TE itself carries its Python files. Nothing of either is installed or imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from ub_dynamic.backends.te import build

# The oldest and the newest; 2.17 brought cuBLASMp, and with it further methods of the communicators.
VERSIONS = ("2.10.0", "2.11.0", "2.14.0", "2.16.1", "2.18.0", "2.20.2")
_BINDING = "transformer-engine-torch"


def headers(version: str) -> Path:
    """The folder ``common`` of TE's headers."""
    return _binding(version) / "common_headers" / "common"


def binding_sources(version: str) -> list[Path]:
    """The files that define ``transformer_engine_torch``."""
    return [*sorted((_binding(version) / "csrc").rglob("*.cpp")), headers(version) / "util" / "pybind_helper.h"]


def python_files(version: str) -> Path:
    """The folder that holds the package ``transformer_engine``."""
    target = build.cache_folder() / "published" / version / "python"
    if not target.exists():
        with _scratch(target) as folder:
            fetch = ("download", "--no-deps", "--only-binary", ":all:", "-d", folder)
            _pip(*fetch, f"transformer-engine=={version}")
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                wheel.extractall(Path(folder) / "all", [n for n in wheel.namelist() if n.endswith(".py")])
            _put(Path(folder) / "all", target)
    return target


def _binding(version: str) -> Path:
    target = build.cache_folder() / "published" / version / "binding"
    if not target.exists():
        with _scratch(target) as folder:
            archive = _download_sources(version, Path(folder))
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
            unpacked = Path(folder) / archive.name.removesuffix(".tar.gz")
            kept = Path(folder) / "kept"
            kept.mkdir()
            for name in ("common_headers", "csrc"):
                shutil.move(unpacked / name, kept / name)
            _put(kept, target)
    return target


def _put(kept: Path, target: Path) -> None:
    """Unless another process was faster."""
    try:
        os.replace(kept, target)
    except OSError:
        if not target.exists():
            raise


def _scratch(target: Path) -> tempfile.TemporaryDirectory[str]:
    target.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=target.parent)


def _download_sources(version: str, scratch: Path) -> Path:
    # pip asks the package for its metadata, whose setup.py needs torch (which is here) and wheel.
    tools = scratch / "tools"
    _pip("install", "--target", str(tools), "wheel")
    fetch = ("download", "--no-deps", "--no-build-isolation", "--no-binary", _BINDING, "-d", str(scratch))
    _pip(*fetch, f"{_BINDING}=={version}", path=tools)
    return next(scratch.glob("*.tar.gz"))


def _pip(*args: str, path: Path | None = None) -> None:
    """Skips (in CI: fails) if pip cannot fetch."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *args]
    env = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        text = f"pip could not fetch TE's files (no network?): {done.stderr.strip()[-600:]}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(text)

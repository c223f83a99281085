# SPDX-License-Identifier: Apache-2.0
"""Compiles the one native file for the installed Transformer Engine, once per user, into a private cache.

One plain compiler call: no nvcc, no CUDA toolkit, no build system. All ranks may start at once (one
compiles, the others wait for a lock that the operating system drops when its holder dies) and a build may
be killed at any time (the finished file appears by an atomic rename, or not at all).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from ...errors import UBTimeoutError, UBUnsupportedError

SOURCES = Path(__file__).parent / "csrc"
MODULE = "active_shape"
_TE_HEADERS = ("comm_gemm_overlap.h", "transformer_engine.h")
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_TIMEOUT_S = 300.0
_STILL_WORKS = "TE overlap at a fixed capacity keeps working without it"


# NDEBUG: without it pybind11 asks at every count of a reference whether the interpreter's lock is held.
_FLAGS = ("-O2", "-DNDEBUG", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall")


@dataclass(frozen=True)
class Toolchain:
    """What a build is made with, and with it everything that a finished file must match to be used again."""

    compiler: tuple[str, ...]
    te_version: str
    te_include: Path
    pybind11_include: Path
    python_include: Path

    def flags(self) -> list[str]:
        """Everything between the compiler and its files."""
        includes = [self.te_include, self.pybind11_include, self.python_include]
        return [
            *_FLAGS,
            *_abi_flags(),
            f"-I{SOURCES / 'include'}",
            f"-I{SOURCES}",
            *(f"-isystem{folder}" for folder in includes),
        ]

    @cached_property
    def key(self) -> str:
        """Names the cache entry: readable versions, then a hash of all that goes into the file."""
        digest = hashlib.sha256()
        texts = [*sorted(SOURCES.rglob("*.h")), *sorted(SOURCES.rglob("*.cpp"))]
        for path in [*texts, *(self.te_include / "transformer_engine" / name for name in _TE_HEADERS)]:
            digest.update(path.read_bytes())
        abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
        for part in (self.te_version, torch.__version__, abi, platform.machine(), *_FLAGS, *_abi_flags()):
            digest.update(f"\0{part}".encode())
        python = f"py{sys.version_info.major}{sys.version_info.minor}"
        return f"te{self.te_version}-torch{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


def build(*, force: bool = False) -> Path:
    """Path of the compiled module for this Python, torch and TE; compiles it unless the cache has it.

    Raises :class:`UBUnsupportedError` saying what to install where a compiler or a header is missing, or TE
    is not one that this package knows, and :class:`UBTimeoutError` if another process holds the build lock
    for too long.
    """
    tools = find_toolchain()
    folder = cache_folder()
    finished = folder / tools.key / f"{MODULE}.so"
    if finished.exists() and not force:
        return finished
    with _lock(folder / f"{tools.key}.lock"):
        if force or not finished.exists():
            _sweep(folder, tools.key)
            _compile_into(folder, tools, finished)
    return finished


def find_toolchain() -> Toolchain:
    """Where compiler and headers are; :class:`UBUnsupportedError` names the first that is missing."""
    te_version, te_package = find_te()
    te_include = te_package / "common" / "include"
    if not (te_include / "transformer_engine" / _TE_HEADERS[0]).is_file():
        raise UBUnsupportedError(
            f"Transformer Engine {te_version} at {te_package} ships no {_TE_HEADERS[0]}; versions from "
            "2.10 on do: "
            f"pip install -U 'transformer-engine[pytorch]'. {_STILL_WORKS}"
        )
    python_include = Path(sysconfig.get_paths()["include"])
    if not (python_include / "Python.h").is_file():
        raise UBUnsupportedError(
            f"{python_include / 'Python.h'} is missing: install Python's development headers (python3-dev or "
            f"python3-devel). {_STILL_WORKS}"
        )
    pybind11_include = Path(torch.__file__).parent / "include"
    if not (pybind11_include / "pybind11" / "pybind11.h").is_file():
        raise UBUnsupportedError(
            f"torch {torch.__version__} ships no pybind11 headers in {pybind11_include}; install torch "
            "from PyPI or "
            f"pytorch.org. {_STILL_WORKS}"
        )
    return Toolchain(_find_compiler(), te_version, te_include, pybind11_include, python_include)


def cache_folder() -> Path:
    """The private cache of this user: ``UB_DYNAMIC_CACHE``, ``XDG_CACHE_HOME/ub_dynamic`` or
    ``~/.cache/ub_dynamic``.

    Code is loaded from it, so a folder that somebody else owns or can write to is refused.
    """
    chosen = os.environ.get("UB_DYNAMIC_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "ub_dynamic"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UBUnsupportedError(
            f"the cache folder {folder} cannot be made ({error}): set UB_DYNAMIC_CACHE to a folder of your own"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UBUnsupportedError(
            f"the cache folder {folder} belongs to or can be written by other users, and code is loaded "
            "from it: "
            "make it private (chmod 700), or set UB_DYNAMIC_CACHE to a folder of your own"
        )
    return folder


def find_te() -> tuple[str, Path]:
    """Version and package folder of the installed Transformer Engine, without importing it."""
    found = importlib.util.find_spec("transformer_engine")
    if found is None or not found.submodule_search_locations:
        raise UBUnsupportedError(
            "Transformer Engine is not installed: pip install --no-build-isolation 'transformer-engine[pytorch]'"
        )
    for name in ("transformer_engine", "transformer_engine_cu13", "transformer_engine_cu12"):
        try:
            return importlib.metadata.version(name), Path(found.submodule_search_locations[0])
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UBUnsupportedError("the installed Transformer Engine carries no version; reinstall it with pip")


def _find_compiler() -> tuple[str, ...]:
    chosen = os.environ.get("CXX", "").split()
    for name in chosen[:1] or _COMPILERS:
        if path := shutil.which(name):
            return (path, *chosen[1:])
    wanted = f"CXX={' '.join(chosen)}, which" if chosen else f"one of {', '.join(_COMPILERS)}, but none"
    raise UBUnsupportedError(
        f"compiling the native file needs {wanted} is not on PATH: install g++ or clang++ (C++17), or "
        "build the cache "
        f"where there is one with `python -m ub_dynamic build` and set UB_DYNAMIC_CACHE. {_STILL_WORKS}"
    )


def _abi_flags() -> list[str]:
    # What torch's own extensions are compiled with, TE's among them: objects are cast between the two
    # modules.
    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # torch before 2.9 or so pins pybind11's ABI tag
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            flags.append(f'-DPYBIND11_{name}="{value}"')
    return flags


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    lock = FileLock(path, timeout=2 * _COMPILE_TIMEOUT_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise UBTimeoutError(
            f"another process has compiled the native file for {2 * _COMPILE_TIMEOUT_S:g} s, holding {path}"
        ) from error
    except (NotImplementedError, OSError):
        # A file system without locks: several ranks may compile at once, and each renames a complete file.
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _sweep(folder: Path, key: str) -> None:
    # The lock is ours, so whoever made these was killed.
    for leftover in folder.glob(f".{key}.*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _compile_into(folder: Path, tools: Toolchain, finished: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{tools.key}.", dir=folder))
    try:
        made = scratch / finished.name
        compile_file(tools, SOURCES / f"{MODULE}.cpp", made)
        finished.parent.mkdir(mode=0o700, exist_ok=True)
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        os.replace(made, finished)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def compile_file(tools: Toolchain, source: Path, target: Path) -> None:
    """One compiler call; :class:`UBUnsupportedError` with the end of the compiler's text if it fails."""
    command = [*tools.compiler, *tools.flags(), str(source), "-o", str(target), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UBTimeoutError(f"{command[0]} did not finish in {_COMPILE_TIMEOUT_S:g} s") from error
    if done.returncode:
        text = "\n".join(done.stderr.splitlines()[:20])
        raise UBUnsupportedError(
            f"the native file does not compile against Transformer Engine {tools.te_version} with "
            f"{command[0]}; either "
            f"this TE is not one of 2.10 to 2.20, or the compiler lacks C++17. {_STILL_WORKS}.\n{text}"
        )

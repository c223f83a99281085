# SPDX-License-Identifier: Apache-2.0
"""The build cache: all ranks at once, builds that were killed, and machines that lack something."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ub_dynamic.backends.te import build
from ub_dynamic.errors import UBUnsupportedError

ROOT = Path(build.__file__).parents[3]
BUILD = "from ub_dynamic.backends.te.build import build; print(build())"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("UB_DYNAMIC_CACHE", str(folder))
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a compiler that takes its time and writes an empty file: these tests are about the cache."""
    script, log = tmp_path / "compiler", tmp_path / "compiler.log"
    script.write_text(
        f"#!/bin/sh\necho start $$ >> {log}\nsleep ${{COMPILER_SLEEP:-0}}\n"
        'while [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def start(**env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", BUILD],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    return out.strip()


def test_eight_processes_at_once_compile_once(compiler: Path, cache: Path) -> None:
    processes = [start(COMPILER_SLEEP="1") for _ in range(8)]
    paths = {finish(process) for process in processes}
    assert len(paths) == 1
    path = Path(paths.pop())
    assert path.is_file()
    assert path.parent.parent == cache
    assert compiler.read_text().count("start") == 1
    assert not [entry for entry in cache.iterdir() if entry.name.startswith(".")]


def test_a_killed_builder_blocks_nobody(compiler: Path, cache: Path) -> None:
    killed = start(COMPILER_SLEEP="60")
    deadline = time.monotonic() + 120
    while not compiler.exists():
        assert time.monotonic() < deadline
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    leftovers = [entry for entry in cache.iterdir() if entry.name.startswith(".")]
    assert leftovers, "the builder was killed in the middle of its work"
    path = Path(finish(start()))
    assert path.is_file()
    assert not [entry for entry in cache.iterdir() if entry.name.startswith(".")]


def test_a_killed_builder_frees_those_that_wait(compiler: Path, cache: Path) -> None:
    killed = start(COMPILER_SLEEP="60")
    deadline = time.monotonic() + 120
    while not compiler.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    waiting = start()
    time.sleep(1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    assert Path(finish(waiting)).is_file()


def test_a_failed_build_leaves_nothing_and_can_be_repeated(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'comm_gemm_overlap.h: error: no member named _ubuf' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    for _ in range(2):
        with pytest.raises(UBUnsupportedError, match="no member named _ubuf") as caught:
            build.build()
        assert "fixed capacity" in str(caught.value)
    assert not list(cache.rglob("*.so"))
    assert not [entry for entry in cache.iterdir() if entry.name.startswith(".")]


def test_the_compiler_is_not_called_again(compiler: Path, cache: Path) -> None:
    assert build.build() == build.build()
    assert compiler.read_text().count("start") == 1
    build.build(force=True)
    assert compiler.read_text().count("start") == 2


def test_the_real_compiler_makes_a_module_that_loads(cache: Path) -> None:
    path = build.build()
    code = (
        "import torch, transformer_engine.pytorch, importlib.util as u;"
        f"s = u.spec_from_file_location('active_shape', {str(path)!r}); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); print(len(m.Registry()))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


@pytest.mark.parametrize("name", ["te_version", "compiler_flag", "source", "header"])
def test_the_key_follows_everything_that_matters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.find_toolchain()
    key = before.key
    if name == "te_version":
        monkeypatch.setattr(build, "find_te", lambda: ("2.99.0", before.te_include.parents[1]))
    elif name == "compiler_flag":
        monkeypatch.setattr(build, "_abi_flags", lambda: ["-D_GLIBCXX_USE_CXX11_ABI=0"])
    elif name == "source":
        copy = tmp_path / "csrc"
        shutil.copytree(build.SOURCES, copy)
        (copy / "members.h").write_text((copy / "members.h").read_text() + "\n")
        monkeypatch.setattr(build, "SOURCES", copy)
    else:
        package = tmp_path / "transformer_engine"
        shutil.copytree(before.te_include, package / "common" / "include")
        header = package / "common" / "include" / "transformer_engine" / "comm_gemm_overlap.h"
        header.write_text(header.read_text() + "\n")
        monkeypatch.setattr(build, "find_te", lambda: (before.te_version, package))
    assert build.find_toolchain().key != key


def test_the_cache_is_private(cache: Path) -> None:
    assert stat.S_IMODE(build.cache_folder().stat().st_mode) == 0o700
    cache.chmod(0o777)
    with pytest.raises(UBUnsupportedError, match="chmod 700"):
        build.cache_folder()


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UB_DYNAMIC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "ub_dynamic"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / ".cache" / "ub_dynamic"


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UB_DYNAMIC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UBUnsupportedError, match="set UB_DYNAMIC_CACHE"):
        build.cache_folder()


def test_missing_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UBUnsupportedError, match=r"install g\+\+ or clang\+\+") as caught:
        build.build()
    assert "python -m ub_dynamic build" in str(caught.value)
    monkeypatch.setenv("CXX", "icpx -fast")
    with pytest.raises(UBUnsupportedError, match="CXX=icpx -fast"):
        build.build()


def test_missing_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(build, "find_te", lambda: ("2.8.0", tmp_path))
        with pytest.raises(UBUnsupportedError, match=r"2\.8\.0 .* versions from 2\.10 on"):
            build.find_toolchain()
    with monkeypatch.context() as patch:
        patch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        with pytest.raises(UBUnsupportedError, match="python3-dev"):
            build.find_toolchain()
    with monkeypatch.context() as patch:
        patch.setattr(build.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
        with pytest.raises(UBUnsupportedError, match="pybind11"):
            build.find_toolchain()


def test_missing_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        return None

    monkeypatch.setattr(build.importlib.util, "find_spec", absent)
    with pytest.raises(UBUnsupportedError, match="pip install"):
        build.find_toolchain()

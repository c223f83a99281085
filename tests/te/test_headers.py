# SPDX-License-Identifier: Apache-2.0
"""The native source compiles against the headers of every supported Transformer Engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from published import VERSIONS, headers

from ub_dynamic.backends.te import build

LAYOUT = Path(__file__).parent / "csrc" / "layout.cpp"


def toolchain(version: str) -> build.Toolchain:
    return replace(build.find_toolchain(), te_version=version, te_include=headers(version) / "include")


@pytest.mark.parametrize("version", VERSIONS)
def test_native_source_compiles(version: str, tmp_path: Path) -> None:
    target = tmp_path / "active_shape.so"
    build.compile_file(toolchain(version), build.SOURCES / "active_shape.cpp", target)
    assert target.stat().st_size > 10_000


def test_a_renamed_member_does_not_compile(tmp_path: Path) -> None:
    shutil.copytree(headers(VERSIONS[-1]) / "include", tmp_path / "include")
    header = tmp_path / "include" / "transformer_engine" / "comm_gemm_overlap.h"
    header.write_text(header.read_text().replace("_ubufs", "_buffers"))
    tools = replace(build.find_toolchain(), te_include=tmp_path / "include")
    with pytest.raises(build.UBUnsupportedError, match="_ubufs"):
        build.compile_file(tools, build.SOURCES / "active_shape.cpp", tmp_path / "active_shape.so")


def test_a_flag_that_a_version_lacks_is_left_out(tmp_path: Path) -> None:
    shutil.copytree(headers(VERSIONS[-1]) / "include", tmp_path / "include")
    header = tmp_path / "include" / "transformer_engine" / "comm_gemm_overlap.h"
    header.write_text(header.read_text().replace("_rs_overlap_first_gemm", "_first"))
    tools = replace(build.find_toolchain(), te_include=tmp_path / "include")
    build.compile_file(tools, build.SOURCES / "active_shape.cpp", tmp_path / "active_shape.so")


@pytest.mark.parametrize("version", VERSIONS)
def test_stand_ins_give_the_layout_of_the_real_headers(version: str, tmp_path: Path) -> None:
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    packages = sorted(folder for entry in sys.path for folder in Path(entry).glob("nvidia/*/include"))
    if not (cuda / "crt" / "host_defines.h").exists() or not any((p / "nccl.h").exists() for p in packages):
        pytest.skip(f"needs the real CUDA and NCCL headers ({cuda}, nvidia-nccl) to compare with")
    common = headers(version)
    real = [common.parent, common / "include", cuda, *packages]
    stand_ins = [build.SOURCES / "include", common / "include"]
    assert _layout(real, tmp_path / "real") == _layout(stand_ins, tmp_path / "stand-ins")


def _layout(includes: list[Path], program: Path) -> str:
    # Only declarations are used, so nothing of TE has to be linked.
    flags = ["-std=c++17", "-O2", "-Wno-invalid-offsetof", *(f"-I{folder}" for folder in includes)]
    command = [*build.find_toolchain().compiler, *flags, str(LAYOUT), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return subprocess.run([program], capture_output=True, text=True, timeout=60, check=True).stdout

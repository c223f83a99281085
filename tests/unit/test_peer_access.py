# SPDX-License-Identifier: Apache-2.0
"""The library that answers for peer access: built once, whoever builds it, and built again where it is damaged."""

from __future__ import annotations

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ub_dynamic import UBUnsupportedError
from ub_dynamic.testing.peer_access import peer_access_library


class TestPeerAccess:
    def test_the_answer_is_yes(self, tmp_path: Path) -> None:
        library = ctypes.CDLL(str(peer_access_library(tmp_path)))
        answer = ctypes.c_int(0)
        assert library.cudaDeviceCanAccessPeer(ctypes.byref(answer), 0, 7) == 0
        assert answer.value == 1

    def test_builds_at_the_same_time_do_not_meet(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: peer_access_library(tmp_path), range(8)))
        assert len(found) == 1
        assert [path.name for path in tmp_path.iterdir()] == [found.pop().name]

    @pytest.mark.parametrize("kept", [0, 4, 100, 3000, None])
    def test_a_damaged_one_is_built_again(self, tmp_path: Path, kept: int | None) -> None:
        library = peer_access_library(tmp_path)
        whole = library.read_bytes()
        library.write_bytes(b"garbage" if kept is None else whole[:kept])
        assert peer_access_library(tmp_path) == library
        assert library.read_bytes() == whole
        made = library.stat().st_ino
        assert peer_access_library(tmp_path).stat().st_ino == made  # a good one is left as it is

    def test_another_library_is_no_answer(self, tmp_path: Path) -> None:
        library = peer_access_library(tmp_path)
        source = tmp_path / "no.c"
        source.write_text("int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return a + b; }")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
        found = ctypes.CDLL(str(peer_access_library(tmp_path)))
        assert found.cudaDeviceCanAccessPeer(ctypes.byref(ctypes.c_int()), 0, 7) == 0

    def test_a_folder_that_nothing_is_preloaded_from_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "two words"
        folder.mkdir()
        with pytest.raises(UBUnsupportedError, match=r"(?s)cannot be preloaded: .*no space and no colon"):
            peer_access_library(folder)
        assert list(folder.iterdir()) == []

    def test_without_a_compiler_it_says_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CC", "no-such-compiler")
        with pytest.raises(UBUnsupportedError, match="no-such-compiler"):
            peer_access_library(tmp_path)

    def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CC", "false")
        with pytest.raises(UBUnsupportedError, match="failed with 1"):
            peer_access_library(tmp_path)
        assert list(tmp_path.iterdir()) == []

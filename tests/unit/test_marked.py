# SPDX-License-Identifier: Apache-2.0
"""Processes of a run are found by their mark, and end with their files in shared memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until

from ub_dynamic.testing.marked import kill_marked, marked_pids, new_mark, shared_files


def test_marked_processes_are_found_and_ended() -> None:
    mark = new_mark()
    process = subprocess.Popen(["sh", "-c", "setsid sleep 65.5 & sleep 65.5"], env={**os.environ, **mark})
    wait_until(lambda: len(marked_pids(mark)) == 3)
    kill_marked(mark, grace_s=1.0)
    process.wait(10)
    assert marked_pids(mark) == ()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in /dev/shm here")
def test_files_in_shared_memory_end_with_the_processes_that_alone_have_them() -> None:
    name, kept = (Path("/dev/shm", f"ub_dynamic_test_{os.getpid()}_{word}") for word in ("gone", "kept"))
    program = (
        "import mmap, sys, time\n"
        "files = [open(path, 'r+b') for path in sys.argv[1:]]\n"
        "held = [mmap.mmap(file.fileno(), 16) for file in files]\n"
        "time.sleep(60)"
    )
    mark = new_mark()
    try:
        for path in (name, kept):
            path.write_bytes(bytes(16))
        with kept.open("r+b") as file, mmap.mmap(file.fileno(), 16):
            command = [sys.executable, "-c", program, str(name), str(kept)]
            process = subprocess.Popen(command, env={**os.environ, **mark})
            wait_until(lambda: shared_files(marked_pids(mark)) == {str(name), str(kept)})
            kill_marked(mark, grace_s=1.0)
            process.wait()
            assert not name.exists()
            assert kept.exists(), "another process has it too"
    finally:
        name.unlink(missing_ok=True)
        kept.unlink(missing_ok=True)

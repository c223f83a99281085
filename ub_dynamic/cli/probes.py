# SPDX-License-Identifier: Apache-2.0
"""What is installed here, found without importing anything that could fail badly: facts for `doctor`.

MPI and Transformer Engine are asked in processes of their own, so that a broken installation is a finding.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ..errors import UBDynamicError
from ..testing.launch import find_mpirun, mpi_flavor
from ..testing.mps import CONTROL
from .versions import installed, needed, satisfies

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for: what was found, and what to do where it is missing or broken."""

    room: str
    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Ability:
    """Something that the package offers: whether it works here, and else what is in the way."""

    name: str
    missing: tuple[str, ...]

    @property
    def works(self) -> bool:
        return not self.missing


def examine() -> list[Finding]:
    """Every finding, in the order to show them."""
    return [*_base(), *_host(), *_te(), *_extras()]


def abilities(findings: list[Finding]) -> list[Ability]:
    """What works here, as far as it can be told without trying."""
    absent = {finding.name for finding in findings if finding.state != "ok"}

    def ability(name: str, *needs: str) -> Ability:
        return Ability(name, tuple(need for need in needs if need in absent))

    native = ("CUDA device", "Transformer Engine", "native file")
    return [
        ability("layouts, rules, packing", "torch"),
        ability("host backend over MPI (mpirun)", "mpi4py", "MPI library", "mpirun", "numpy"),
        ability("host backend over gloo (torchrun)", "gloo", "numpy"),
        ability("TE backend with an active shape", *native),
        ability("TE backend at a fixed capacity", "CUDA device", "Transformer Engine"),
        ability("megatron-core with TP overlap", *native, "megatron-core"),
        ability("several ranks on one GPU", *native, "NCCL"),
        ability("several ranks on one GPU, side by side (--mps)", *native, "NCCL", "MPS daemon"),
        ability("pictures", "matplotlib"),
        ability("advise", "numpy"),
        ability("advise on Parquet files", "numpy", "pyarrow"),
        ability("the tests", "numpy", "pytest", "hypothesis", "pytest-timeout", "pytest-xdist"),
        ability("the pages of docs/", "mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python"),
    ]


def _base() -> list[Finding]:
    import torch
    import torch.distributed as dist

    room = "base"
    findings = [
        Finding(room, "Python", "ok", f"{platform.python_version()} ({sys.executable})"),
        _itself(room),
        _checked(room, "torch", torch.__version__, "pip install -U torch"),
    ]
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names = {torch.cuda.get_device_name(index) for index in range(count)}
        findings.append(Finding(room, "CUDA device", "ok", f"{count} x {', '.join(sorted(names))}"))
    elif torch.version.cuda is None:
        found = "torch is a CPU build"
        findings.append(Finding(room, "CUDA device", "missing", found, "for the TE backend: torch's CUDA build"))
    else:
        found = f"torch for CUDA {torch.version.cuda} sees none"
        findings.append(Finding(room, "CUDA device", "missing", found, "check nvidia-smi, CUDA_VISIBLE_DEVICES"))
    triton = find_spec("triton") is not None
    text = "merges ring attention in one launch" if triton else "not installed: ring attention takes more launches"
    findings.append(Finding(room, "Triton", "ok" if triton else "missing", text))
    for name, there in (("gloo", dist.is_gloo_available()), ("NCCL", dist.is_nccl_available())):
        advice = "" if there else f"install a torch that is built with {name}"
        text = "in torch" if there else "not in this torch"
        findings.append(Finding(room, name, "ok" if there else "missing", text, advice))
    return findings


def _itself(room: str) -> Finding:
    """Without its metadata, or without `packaging`, nobody knows which versions of the others it needs."""
    folder = str(Path(__file__).resolve().parents[2])
    if installed("ub_dynamic") is None:
        text = f"{folder}, not installed, so that minimum versions are not checked"
        return Finding(room, "ub_dynamic", "missing", text, "pip install -e . in the checkout")
    if find_spec("packaging") is None:
        text = f"{folder}; minimum versions are not checked without packaging"
        return Finding(room, "ub_dynamic", "missing", text, "pip install 'ub_dynamic[cli]'")
    return Finding(room, "ub_dynamic", "ok", folder)


def _host() -> list[Finding]:
    room, advice = "host backend", "pip install 'ub_dynamic[mpi]'"
    findings = [_package(room, "numpy", advice="pip install numpy"), _package(room, "mpi4py", advice=advice)]
    library = _mpi_library(room) if findings[-1].state == "ok" else None
    findings += [library] if library else []
    mpirun = find_mpirun()
    if mpirun is None:
        findings.append(Finding(room, "mpirun", "missing", "not beside this Python nor on PATH", advice))
    else:
        findings.append(_mpirun(room, mpirun, library.found if library and library.state == "ok" else ""))
    return findings


def _mpirun(room: str, mpirun: str, library: str) -> Finding:
    """A launcher of another MPI than the one that mpi4py loads starts ranks of which each is alone."""
    try:
        flavor = mpi_flavor(mpirun)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(room, "mpirun", "broken", f"{mpirun} does not start: {error}", "see UB_DYNAMIC_MPIRUN")
    other = {"mpich": "open mpi", "openmpi": "mpich"}.get(flavor)
    if other and other in library.lower():
        text = f"{mpirun} ({flavor}), but mpi4py loads {library}: each rank would be alone"
        advice = "name the mpirun of that library with UB_DYNAMIC_MPIRUN, or its libmpi with MPI4PY_LIBMPI"
        return Finding(room, "mpirun", "broken", text, advice)
    return Finding(room, "mpirun", "ok", f"{mpirun} ({flavor})")


def _mpi_library(room: str) -> Finding:
    """Which MPI mpi4py loads: Get_library_version may be called before MPI_Init."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; import json; from mpi4py import MPI; "
        "print(json.dumps(MPI.Get_library_version()))"
    )
    answer = _ask(code)
    if isinstance(answer, str):
        lines = [line.strip() for line in answer.replace("\x00", "").splitlines() if line.strip()]
        return Finding(room, "MPI library", "ok", ", ".join(" ".join(line.split()) for line in lines[:1]))
    return Finding(
        room,
        "MPI library",
        "broken",
        answer["error"],
        "pip install mpich, or set MPI4PY_LIBMPI to your MPI's libmpi",
    )


def _te() -> list[Finding]:
    room = "TE backend"
    if find_spec("transformer_engine") is None:
        advice = "pip install --no-build-isolation 'transformer-engine[pytorch]' (it needs torch's CUDA build)"
        missing = Finding(room, "Transformer Engine", "missing", "not installed", advice)
        return [
            missing,
            Finding(room, "native file", "missing", "needs Transformer Engine"),
            _mps(room),
            _megatron(room),
        ]
    answer = _ask("import json, torch, transformer_engine.pytorch; print(json.dumps('imports'))")
    version = installed("transformer_engine") or "version unknown"
    if answer == "imports":
        findings = [Finding(room, "Transformer Engine", "ok", version)]
    else:
        text = f"{version}, but it does not import: {answer['error']}"
        advice = "reinstall it for this torch: pip install --force-reinstall --no-build-isolation"
        findings = [Finding(room, "Transformer Engine", "broken", text, f"{advice} 'transformer-engine[pytorch]'")]
    return [*findings, *_native(room), *_te_details(room), _mps(room), _megatron(room)]


def _native(room: str) -> list[Finding]:
    """Whether the native file is compiled, or could be: by the backend's own search for compiler and headers."""
    try:
        from ..backends.te import build

        tools = build.find_toolchain()
        finished = build.cache_folder() / tools.key / f"{build.MODULE}.so"
    except UBDynamicError as error:
        return [Finding(room, "native file", "missing", "cannot be compiled", str(error))]
    except ImportError as error:
        return [Finding(room, "native file", "missing", str(error), "pip install 'ub_dynamic[te]'")]
    compiler = Finding(room, "C++ compiler", "ok", " ".join(tools.compiler))
    headers = Finding(room, "TE headers", "ok", str(tools.te_include))
    state = "compiled" if finished.exists() else "will be compiled at first use (some seconds)"
    return [compiler, headers, Finding(room, "native file", "ok", f"{state}: {finished}")]


def _te_details(room: str) -> list[Finding]:
    """What TE's own attention can do with packed sequences under context parallelism."""
    code = (
        "import json; from dataclasses import asdict; from ub_dynamic.cp.capabilities import te_capabilities; "
        "print(json.dumps(asdict(te_capabilities())))"
    )
    answer = _ask(code)
    if "error" in answer:
        return [Finding(room, "TE's attention", "broken", answer["error"], "please report this")]
    if answer["te"] is None:  # it does not import, which is a finding already
        return []
    kinds = [key.removeprefix("thd_").replace("a2a_p2p", "a2a+p2p") for key in answer if key.startswith("thd_")]
    taken = [kind for kind, key in zip(kinds, (k for k in answer if k.startswith("thd_")), strict=True) if answer[key]]
    flash = ", ".join(map(str, answer["flash"])) or "none"
    text = f"packed with cp: {', '.join(taken) or 'not at all'}; FlashAttention: {flash}"
    patches = "found what they patch" if answer["patches"] else "do not know this version, and refuse"
    return [
        Finding(room, "TE's attention", "ok", text),
        Finding(room, "TE backward patches", "ok" if answer["patches"] else "missing", patches),
    ]


def _megatron(room: str) -> Finding:
    """Whether the adapter finds all that it wraps, in this version: it is installed and taken back."""
    found = _package(room, "megatron-core", advice="pip install 'ub_dynamic[megatron]'")
    if found.state != "ok" or find_spec("transformer_engine") is None:
        return found
    answer = _ask(
        "import json; from ub_dynamic.integrations import megatron as m; m.install(); m.uninstall(); "
        "print(json.dumps('fits'))"
    )
    if answer == "fits":
        return Finding(room, found.name, "ok", f"{found.found}, the adapter fits")
    text = f"{found.found}: {answer['error']}"
    return Finding(room, found.name, "broken", text, "a version that the adapter was written for: docs/moving.md")


def _mps(room: str) -> Finding:
    found = shutil.which(CONTROL)
    if found is None:
        return Finding(room, "MPS daemon", "missing", f"{CONTROL} is not on PATH", "it comes with the NVIDIA driver")
    return Finding(room, "MPS daemon", "ok", found)


def _extras() -> list[Finding]:
    extras = {
        "cli": ("typer", "rich", "packaging"),
        "plot": ("matplotlib",),
        "advise": ("pyarrow",),
        "test": ("pytest", "hypothesis", "pytest-timeout", "pytest-xdist"),
        "docs": ("mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python"),
        "dev": ("ruff", "mypy"),
    }
    return [
        _package("extras", name, advice=f"pip install 'ub_dynamic[{extra}]'")
        for extra, names in extras.items()
        for name in names
    ]


def _package(room: str, name: str, *, advice: str) -> Finding:
    return _checked(room, name, installed(name), advice)


def _checked(room: str, name: str, version: str | None, advice: str) -> Finding:
    if version is None:
        return Finding(room, name, "missing", "not installed", advice)
    if (range_ := needed(name)) and not satisfies(version, range_):
        return Finding(room, name, "broken", f"{version}, but {range_} is needed", advice)
    return Finding(room, name, "ok", version)


def _ask(code: str, timeout_s: float = 120.0) -> Any:
    """The JSON that `code` prints last in a Python of its own, or {"error": why not}."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {timeout_s:g} s"}
    if done.returncode < 0:
        return {"error": f"ended by signal {-done.returncode}"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = (done.stderr or done.stdout).strip().splitlines()
        return {"error": lines[-1] if lines else f"exited {done.returncode} and said nothing"}

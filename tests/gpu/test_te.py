# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine with dynamic UserBuffers on a real GPU: several ranks share it, one start runs many
cases.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness

# UB_DYNAMIC_TEST_TP=2 runs a part; UB_DYNAMIC_TEST_TP=2,4,8 adds eight ranks
SIZES = tuple(int(size) for size in os.environ.get("UB_DYNAMIC_TEST_TP", "2,4").split(","))
PAIRS = [
    (tp, name)
    for tp in SIZES
    for name, known in harness.load_cases().items()
    if tp in known.tp or (tp not in (2, 4) and 4 in known.tp)
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one_gpu")


@pytest.fixture(scope="session")
def outcomes() -> dict[int, dict[str, harness.Result]]:
    """Results by number of ranks, filled when the first case of that number is asked for."""
    return {}


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("tp", "name"), PAIRS, ids=[f"tp{tp}-{name}" for tp, name in PAIRS])
def test_on_one_gpu(
    tp: int,
    name: str,
    folder: Path,
    outcomes: dict[int, dict[str, harness.Result]],
    request: pytest.FixtureRequest,
) -> None:
    if tp not in outcomes:
        outcomes[tp] = harness.run_cases(tp, _selected(request.session, tp), folder)
    result = outcomes[tp][name]
    print(f"{result.seconds:.1f} s on the device", *result.notes, sep="\n")
    assert not result.error, result.error


def _selected(session: pytest.Session, tp: int) -> list[str]:
    """The cases of this number of ranks that this session is to run: one start runs them all."""
    parameters = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    return [chosen["name"] for chosen in parameters if chosen.get("tp") == tp and "name" in chosen]

# SPDX-License-Identifier: Apache-2.0
"""What the tests of the programs of benchmarks/ share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from benchmark_programs import BENCHMARKS


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("_one_gpu", "_side_by_side", "packed", "packed.data"):
        sys.modules.pop(name, None)

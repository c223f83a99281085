# SPDX-License-Identifier: Apache-2.0
"""Random operations on one set of host buffers, bit by bit against buffers made for exactly each T."""

from __future__ import annotations

import pytest

from ub_dynamic.groups import MPIGroup
from ub_dynamic.testing import host_stress


@pytest.mark.mpi(2, 4, timeout=400)
def test_random_operations(mpi_comm) -> None:
    texts: list[str] = []
    outcome = host_stress.run(MPIGroup(mpi_comm), 600, seed=3, report=texts.append)  # benchmarks/host_stress.py: 2,000
    assert outcome.operations >= 600
    assert outcome.mismatches == 0, texts[:3]
    assert outcome.allocations == 0
    assert outcome.shape_changes > 150

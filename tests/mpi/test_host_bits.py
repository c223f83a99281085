# SPDX-License-Identifier: Apache-2.0
"""Capacity C with active T gives the bits of exactly T: every host communicator, and the layers."""

from __future__ import annotations

import pytest

from ub_dynamic.groups import MPIGroup
from ub_dynamic.shapes import Collective, Method
from ub_dynamic.testing import host_bits

CASES = 200
SEED = 1


@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize(("method", "collective"), host_bits.COMMUNICATORS)
def test_communicator(mpi_comm, method: Method, collective: Collective) -> None:
    group = MPIGroup(mpi_comm)
    backend = host_bits.case_backend(group)
    wrong = []
    for case in host_bits.random_cases(method, collective, group.size, CASES, SEED):
        wrong += host_bits.run_case(backend, method, collective, case)
    backend.destroy()
    assert not wrong, f"{len(wrong)} differences, the first ones: " + "\n".join(wrong[:3])


@pytest.mark.mpi(2, 4)
def test_layers(mpi_comm) -> None:
    group = MPIGroup(mpi_comm)
    wrong = []
    for case in host_bits.random_layer_cases(group.size, 12, SEED):
        wrong += host_bits.run_layer_case(group, case)
    assert not wrong, f"{len(wrong)} differences, the first ones: " + "\n".join(wrong[:3])

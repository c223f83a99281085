# SPDX-License-Identifier: Apache-2.0
"""Capacity C with active T gives the bits of exactly T: every host communicator, and the layers."""

from __future__ import annotations

import pytest

from ub_dynamic.groups import Group, MPIGroup, tensor_parallel_group
from ub_dynamic.shapes import Collective, Method
from ub_dynamic.testing import host_bits, host_layer_bits

CASES = 200
SEED = 1


@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize(("method", "collective"), host_bits.COMMUNICATORS)
def test_communicator(mpi_comm, method: Method, collective: Collective) -> None:
    check_communicator(MPIGroup(mpi_comm), method, collective, CASES)


@pytest.mark.mpi(2, 4)
def test_layers(mpi_comm) -> None:
    check_layers(MPIGroup(mpi_comm), 12)


@pytest.mark.mpi(2, launcher="torchrun")
def test_over_gloo() -> None:
    group = tensor_parallel_group(2)
    for method, collective in host_bits.COMMUNICATORS:
        check_communicator(group, method, collective, 20)
    check_layers(group, 4)


def check_communicator(group: Group, method: Method, collective: Collective, count: int) -> None:
    backend = host_bits.case_backend(group)
    wrong = []
    for case in host_bits.random_cases(method, collective, group.size, count, SEED):
        wrong += host_bits.run_case(backend, method, collective, case)
    backend.destroy()
    assert not wrong, f"{len(wrong)} differences, the first ones: " + "\n".join(wrong[:3])


def check_layers(group: Group, count: int) -> None:
    wrong = []
    for case in host_layer_bits.random_layer_cases(group.size, count, SEED):
        wrong += host_layer_bits.run_layer_case(group, case)
    assert not wrong, f"{len(wrong)} differences, the first ones: " + "\n".join(wrong[:3])

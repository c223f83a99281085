# SPDX-License-Identifier: Apache-2.0
"""Messages of the host backend: a size that differs is an error of its own, over MPI and over gloo."""

from __future__ import annotations

import numpy as np
import pytest

from ub_dynamic.backends.host.transport import MessageSizeError, create_transport
from ub_dynamic.groups import Group, MPIGroup, tensor_parallel_group

SIZES = (1, 100, 1 << 10, 1 << 22)


def exchange(group: Group) -> None:
    transport = create_transport(group, 20)
    other = 1 - group.rank
    for tag, size in enumerate(SIZES):
        sent = np.full(size, 7 + group.rank, dtype=np.uint8)
        received = np.zeros(size, dtype=np.uint8)
        requests = [transport.receive(received, other, tag), transport.send(sent, other, tag)]
        assert transport.finish(requests, lambda: False)
        assert (received == 7 + other).all()
    group.barrier("ending the exchange")
    transport.close()


def another_size(group: Group, sent: int, expected: int) -> None:
    """Rank 0 sends another number of bytes than rank 1 expects."""
    transport = create_transport(group, 20)
    if group.rank == 0:
        request = transport.send(np.zeros(sent, dtype=np.uint8), 1, 5)
    else:
        request = transport.receive(np.zeros(expected, dtype=np.uint8), 0, 5)
        with pytest.raises(MessageSizeError) as caught:
            transport.finish([request], lambda: False)
        assert caught.value.peer == 0
        assert f"{expected}" in str(caught.value)
    group.barrier("comparing sizes")


@pytest.mark.mpi(2)
def test_mpi_exchange(mpi_comm) -> None:
    exchange(MPIGroup(mpi_comm))


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("sent", "expected"), [(8, 16), (16, 8), (1 << 20, 1 << 22)])
def test_mpi_another_size(mpi_comm, sent: int, expected: int) -> None:
    another_size(MPIGroup(mpi_comm), sent, expected)


@pytest.mark.mpi(2)
def test_mpi_gives_up_when_cancelled(mpi_comm) -> None:
    group = MPIGroup(mpi_comm)
    transport = create_transport(group, 20)
    request = transport.receive(np.zeros(8, dtype=np.uint8), 1 - group.rank, 9)
    assert not transport.finish([request], lambda: True)
    group.barrier("giving up")


@pytest.mark.mpi(2, launcher="torchrun")
def test_gloo_exchange() -> None:
    exchange(tensor_parallel_group(2))


@pytest.mark.mpi(2, launcher="torchrun")
@pytest.mark.parametrize(("sent", "expected"), [(8, 16), (1 << 20, 16)])
def test_gloo_another_size(sent: int, expected: int) -> None:
    another_size(tensor_parallel_group(2), sent, expected)

# SPDX-License-Identifier: Apache-2.0
"""Communicators of the host backend on the ranks of a test, and operands for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ub_dynamic as ubd
from ub_dynamic.backends.host import current_backend

HIDDEN, ROWS = 64, 32  # ROWS: tokens a rank owns at capacity


@contextmanager
def started(mpi_comm: Any, **options: Any) -> Iterator[int]:
    tp = mpi_comm.Get_size()
    ubd.initialize_ub((ROWS * tp, HIDDEN), tp, dtype=torch.float32, backend="host", tp_group=mpi_comm, **options)
    try:
        yield tp
    finally:
        ubd.destroy_ub()


def data(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + current_backend().group.rank)
    return torch.randn((rows, HIDDEN), generator=generator)

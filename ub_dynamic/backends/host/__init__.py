# SPDX-License-Identifier: Apache-2.0
"""TP communication/GEMM overlap on CPU, over MPI or gloo: the same script, layouts and tests run on a
laptop."""

from .backend import HostBackend, create_host_backend, current_backend, get_ub
from .layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_reduce_sequence_parallel_gradients,
    mark_sequence_parallel,
)

__all__ = [
    "ColumnParallelLinear",
    "HostBackend",
    "RowParallelLinear",
    "all_reduce_sequence_parallel_gradients",
    "create_host_backend",
    "current_backend",
    "get_ub",
    "mark_sequence_parallel",
]

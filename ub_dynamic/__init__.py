# SPDX-License-Identifier: Apache-2.0
"""Variable token counts for tensor-parallel communication/GEMM overlap.

A buffer has a *capacity*, registered once, and an *active shape*, set per microbatch on the host at no cost.
"""

from .api import (
    active_shape,
    bind_backward,
    destroy_ub,
    get_buffer_active_shape,
    get_buffer_capacity_shape,
    get_ub_active_shape,
    get_ub_capacity_shape,
    initialize_ub,
    install,
    is_ub_initialized,
    max_tokens,
    microbatch,
    reset_ub_active_shape,
    round_up_tokens,
    set_buffer_active_shape,
    set_ub_active_shape,
    token_multiple,
    uninstall,
)
from .errors import (
    UBAlignmentError,
    UBCapacityError,
    UBDynamicError,
    UBRankMismatchError,
    UBShapeError,
    UBStateError,
    UBTimeoutError,
    UBUnsupportedError,
)
from .manager import Manager
from .packing import PackedBatch
from .planning import plan_microbatches
from .reports import ShapeReport
from .scopes import Microbatch

__version__ = "0.1.0"

__all__ = [
    "Manager",
    "Microbatch",
    "PackedBatch",
    "ShapeReport",
    "UBAlignmentError",
    "UBCapacityError",
    "UBDynamicError",
    "UBRankMismatchError",
    "UBShapeError",
    "UBStateError",
    "UBTimeoutError",
    "UBUnsupportedError",
    "active_shape",
    "bind_backward",
    "destroy_ub",
    "get_buffer_active_shape",
    "get_buffer_capacity_shape",
    "get_ub_active_shape",
    "get_ub_capacity_shape",
    "initialize_ub",
    "install",
    "is_ub_initialized",
    "max_tokens",
    "microbatch",
    "plan_microbatches",
    "reset_ub_active_shape",
    "round_up_tokens",
    "set_buffer_active_shape",
    "set_ub_active_shape",
    "token_multiple",
    "uninstall",
]

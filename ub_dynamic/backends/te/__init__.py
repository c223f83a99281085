# SPDX-License-Identifier: Apache-2.0
"""Stock Transformer Engine: its own communicators, given an active shape by one small native file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import TEBackend


def create_te_backend(*args: Any, **options: Any) -> TEBackend:
    """See :func:`ub_dynamic.backends.te.initialize.create_te_backend`; imports Transformer Engine."""
    from .initialize import create_te_backend as create

    return create(*args, **options)

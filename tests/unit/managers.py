# SPDX-License-Identifier: Apache-2.0
"""A manager over the recording backend, and a function whose backward notes the active shape."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from fake_backend import FakeBackend

from ub_dynamic.manager import Manager


def make(backend: FakeBackend | None = None, **options: object) -> tuple[Manager, FakeBackend]:
    backend = backend or FakeBackend()
    return Manager(backend, next(iter(backend.specs.values())).capacity, check="never", **options), backend  # type: ignore[arg-type]


class Seen(torch.autograd.Function):
    """Notes the active shape that its backward sees."""

    @staticmethod
    def forward(ctx, x, manager, notes):  # type: ignore[no-untyped-def]
        ctx.manager, ctx.notes = manager, notes
        ctx.save_for_backward(x)  # non-reentrant checkpoints recompute when this is unpacked
        return x * 2

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.saved_tensors  # noqa: B018
        ctx.notes.append(ctx.manager.active[0])
        return grad * 2, None, None

# SPDX-License-Identifier: Apache-2.0
"""Which packed batch an attention call is about, for code that only sees tensors of boundaries.

A call inside ``with packed(batch):`` is about that batch; outside, its boundary tensors are looked up among those
that entered batches have on their devices, by address, so that detached copies (checkpoint recomputation) are found.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..packing import PackedBatch


class _Bound:
    """The batch of a backward under way; emptied when that backward ends, on whichever thread."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch: PackedBatch | None = batch

    def release(self) -> None:
        self.batch = None


class _Local(threading.local):
    scope: PackedBatch | None = None
    bound: _Bound | None = None


_local = _Local()
_addresses: dict[tuple[torch.device, int], weakref.ref[PackedBatch]] = {}


class PackedScope:
    """What ``with packed(batch) as scope`` yields."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch

    def bind_backward(self, output: torch.Tensor) -> torch.Tensor:
        """Make the backward that starts at ``output`` about this batch too; returns ``output`` itself.

        Needed where activations are recomputed from copies of the boundary tensors, and other batches run in between.
        The backward of ``output`` runs after that of later tensors and before that of earlier ones, so bind what
        the microbatch ends with.
        """
        if output.grad_fn is not None:
            batch = self.batch

            def enter(_: object) -> None:
                # On autograd's own thread, which is not that of the forward.
                _local.bound = _Bound(batch)
                torch.autograd.Variable._execution_engine.queue_callback(_local.bound.release)

            output.grad_fn.register_prehook(enter)
        return output


@contextmanager
def packed(batch: PackedBatch) -> Iterator[PackedScope]:
    """Attention calls of this thread inside the block are about ``batch``."""
    remember(batch)
    before, _local.scope = _local.scope, batch
    try:
        yield PackedScope(batch)
    finally:
        _local.scope = before
        remember(batch)  # what was put on a device inside the block


def current_batch() -> PackedBatch | None:
    """The batch of the backward that this thread runs, if bound, else that of the innermost ``with packed``."""
    bound = _local.bound
    if bound is not None and bound.batch is not None:
        return bound.batch
    return _local.scope


def remember(batch: PackedBatch) -> None:
    """Find ``batch`` by the boundary tensors that it has on devices by now, for as long as it lives."""
    for device, tensors in batch._on_device.items():
        for tensor in (tensors.cu_seqlens, tensors.cu_seqlens_padded):
            key = (device, tensor.data_ptr())
            _addresses[key] = weakref.ref(batch, lambda gone, key=key: _forget(key, gone))  # type: ignore[misc]


def batch_of(*boundaries: torch.Tensor | None) -> PackedBatch | None:
    """The batch that boundary tensors describe: the current one if their shapes fit it, else one found by address."""
    given = [one for one in boundaries if one is not None]
    if not given:
        return None
    current = current_batch()
    if current is not None and all(_fits(one, current) for one in given):
        return current
    found = {id(batch): batch for batch in (_by_address(one) for one in given)}
    (batch,) = found.values() if len(found) == 1 else (None,)
    return batch if batch is not None and all(_fits(one, batch) for one in given) else None


def _fits(boundaries: torch.Tensor, batch: PackedBatch) -> bool:
    return tuple(boundaries.shape) == (len(batch.padded) + 1,)


def _by_address(tensor: torch.Tensor) -> PackedBatch | None:
    reference = _addresses.get((tensor.device, tensor.data_ptr()))
    return None if reference is None else reference()


def _forget(key: tuple[torch.device, int], gone: weakref.ref[PackedBatch]) -> None:
    if _addresses.get(key) is gone:
        del _addresses[key]

# SPDX-License-Identifier: Apache-2.0
"""BlockStage: one chunk of the model, its forward and its backward, with blocks that come and go by the routes.

Forward: everything that comes in becomes a leaf of the chunk's own graph, and so does every block that the rank
keeps from an earlier chunk. Backward: gradients of kept blocks are left in the store; the chunk that received or
committed such a block adds them to its own gradient. A rank runs later chunks' backward first, so the sum is
complete by then, without hooks, retained graphs or communication inside autograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..errors import UBShapeError, UBStateError
from .buffers import Lease
from .messages import Message
from .routes import BlockRoutes
from .store import BlockStore

Chunk = Callable[[torch.Tensor | None, Sequence[torch.Tensor], Any], tuple[torch.Tensor, Sequence[torch.Tensor]]]
"""``chunk(hidden, blocks, batch) -> (hidden, committed blocks)``.

``hidden``: ``[T / tp, H]``, None for the first stage, which makes it from ``batch``. ``blocks``: all blocks committed
by earlier stages, in order. The last stage returns its loss, a scalar, in place of the hidden state.
"""

# A gradient edge keeps the graph alive without the output's memory; older torch takes tensors only (before 2.7).
_EDGES = "GradientEdge" in str(inspect.signature(torch.autograd.backward))


@dataclass(frozen=True)
class Output:
    """What goes to the next stage (or, gradients, to the previous one), and the buffers that it may lie in."""

    tensors: list[torch.Tensor]
    leases: tuple[Lease, ...] = ()


@dataclass(frozen=True)
class _Record:
    """What the backward of one microbatch needs. Roots are None where nothing requires a gradient."""

    hidden: torch.Tensor | None
    leaves: dict[int, torch.Tensor]
    sent: list[Any]
    committed: dict[int, Any]
    seed: torch.Tensor | None  # gradient of the loss
    leases: Sequence[Lease]


class BlockStage:
    """Chunk ``stage`` of the model on its rank; ``store`` is the rank's own, shared by its chunks."""

    def __init__(self, chunk: Chunk, stage: int, routes: BlockRoutes, store: BlockStore) -> None:
        self.chunk, self.stage, self.routes, self.store = chunk, stage, routes, store
        self.first, self.last = stage == 0, stage == routes.stages - 1
        self._records: dict[int, _Record] = {}

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, microbatch: int, batch: Any, message: Message | None, training: bool) -> Output:
        """Run the chunk. The output is detached; the last stage's is its loss alone."""
        kept = self.store.kept(microbatch)
        if tuple(sorted(kept)) != self.routes.held_at_entry[self.stage]:
            raise UBStateError(
                f"stage {self.stage} finds blocks {sorted(kept)} of microbatch {microbatch} in the store, "
                f"the routes say {list(self.routes.held_at_entry[self.stage])}"
            )
        leases = list(message.leases) if message else []
        incoming = dict(zip(self.routes.received(self.stage), leases[1:], strict=True))
        hidden = _leaf(message.hidden, training) if message else None
        leaves = {block: _leaf(lease.tensor, training) for block, lease in incoming.items()}
        leaves |= {block: _leaf(value.tensor, training) for block, value in kept.items()}
        with torch.set_grad_enabled(training):
            output, committed = self._run(hidden, [leaves[block] for block in sorted(leaves)], batch)
        leases += [value.lease.share() for value in kept.values() if value.lease]
        self._keep(microbatch, incoming, committed, leases)
        blocks = {**leaves, **committed}
        sent = [output, *(blocks[block] for block in self.routes.send[self.stage])]
        # A send may read any buffer that the chunk has read: an output can be a view of what came in.
        shared = () if self.last else tuple(lease.share() for lease in leases)
        if training:
            roots = {block: _root(tensor) for block, tensor in committed.items()}
            seed = torch.ones_like(output) if self.last else None
            self._records[microbatch] = _Record(hidden, leaves, [_root(t) for t in sent], roots, seed, leases)
        else:
            _release(leases)
        return Output([tensor.detach() for tensor in sent], shared)

    def _run(
        self, hidden: torch.Tensor | None, blocks: list[torch.Tensor], batch: Any
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        output, committed = self.chunk(hidden, blocks, batch)
        numbers = self.routes.commits[self.stage]
        if len(committed) != len(numbers):
            raise UBShapeError(
                f"the chunk of stage {self.stage} committed {len(committed)} blocks, it was built for {len(numbers)}"
            )
        if self.last and output.numel() != 1:
            raise UBShapeError(f"the last stage returns its loss, one number, not {list(output.shape)}")
        return output, dict(zip(numbers, committed, strict=True))

    def _keep(
        self,
        microbatch: int,
        incoming: dict[int, Lease],
        committed: dict[int, torch.Tensor],
        leases: Sequence[Lease],
    ) -> None:
        if not self.routes.keeps(self.stage):
            self.store.release(microbatch)  # this was the rank's last chunk
            return
        for block, lease in incoming.items():
            self.store.put(microbatch, block, lease.tensor, lease)
        for block, tensor in committed.items():
            # A chunk that commits what came in, or a view of it, commits memory of a receive buffer.
            under = next((lease for lease in leases if _memory(lease.tensor) == _memory(tensor)), None)
            self.store.put(microbatch, block, tensor, under)

    # -- backward --------------------------------------------------------------------------------------------

    def backward(self, microbatch: int, message: Message | None) -> Output | None:
        """Run the chunk's backward; the gradients for the previous stage, or None for the first stage."""
        record = self._records.pop(microbatch)
        roots, grads = self._roots(record, microbatch, message)
        if roots:
            torch.autograd.backward(roots, grads)
        del roots, grads
        borrowed = {_memory(lease.tensor) for lease in (message.leases if message else ())}
        result = self._gradients(record, microbatch, borrowed)
        _release([*record.leases, *(message.leases if message else ())])
        if self.stage < self.routes.pp:
            self.store.check_finished(microbatch)
        return result

    def _roots(self, record: _Record, microbatch: int, message: Message | None) -> tuple[list[Any], list[torch.Tensor]]:
        """What the backward starts from: the output, the blocks sent with it, and commits that later chunks read."""
        if self.last:
            assert record.seed is not None
            received = [record.seed]
        else:
            assert message is not None
            received = [message.hidden, *message.blocks]
        pairs = list(zip(record.sent, received, strict=True))
        for block, root in record.committed.items():
            grad = self.store.collect(microbatch, block, self.routes.deposits_expected(block, self.stage))
            if grad is not None:
                pairs.append((root, grad))
        pairs = [(root, grad) for root, grad in pairs if root is not None]  # frozen layers: nothing to do
        return [root for root, _ in pairs], [grad for _, grad in pairs]

    def _gradients(self, record: _Record, microbatch: int, borrowed: set[int]) -> Output | None:
        """Leave the gradients of kept blocks in the store, and return the others for the previous stage."""
        incoming = self.routes.received(self.stage)
        for block, leaf in record.leaves.items():
            if block not in incoming:
                self.store.deposit(microbatch, block, _grad(leaf, borrowed))
        if record.hidden is None:
            return None
        grads = [_grad(record.hidden, borrowed)]
        for block in incoming:
            grad = _grad(record.leaves[block], borrowed)
            later = self.store.collect(microbatch, block, self.routes.deposits_expected(block, self.stage))
            grads.append(grad if later is None else grad + later)
        return Output(grads)

    def drop(self) -> None:
        """Forget every microbatch under way: one has failed."""
        for record in self._records.values():
            _release(record.leases)
        self._records.clear()


def _leaf(tensor: torch.Tensor, training: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_() if training else tensor.detach()


def _root(tensor: torch.Tensor) -> Any:
    if not tensor.requires_grad:
        return None
    return get_gradient_edge(tensor) if _EDGES else tensor


def _grad(leaf: torch.Tensor, borrowed: set[int]) -> torch.Tensor:
    """The gradient of a leaf, in memory that no receive buffer owns: autograd may hand a view of one on."""
    grad = leaf.grad
    if grad is None:
        return torch.zeros_like(leaf)
    return grad.clone() if _memory(grad) in borrowed else grad


def _memory(tensor: torch.Tensor) -> int:
    """The address of what a tensor lies in, the same for all its views."""
    return tensor.untyped_storage().data_ptr()


def _release(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.release()

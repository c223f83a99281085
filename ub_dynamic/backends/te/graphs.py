# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of microbatches whose T varies: one captured callable a shape, in a small cache.

A graph bakes in sizes and addresses, so a later shape change cannot reach it: a graph per shape is the only
way, and a replay stays right for its own T whatever the active shape is by then. A captured callable owns one
set of activations, so it serves one microbatch at a time, from its forward to the end of its backward.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ...errors import UBAlignmentError, UBCapacityError, UBShapeError, UBStateError, UBUnsupportedError
from .captures import ends_when_it_fails

logger = logging.getLogger("ub_dynamic")


class _Shapes(Protocol):
    """What is needed of :class:`ub_dynamic.Manager`, which ``initialize_ub`` returns."""

    @property
    def destroyed(self) -> bool: ...
    @property
    def policy(self) -> Any: ...
    def microbatch(self, batch: Any) -> AbstractContextManager[Any]: ...
    def round_up_tokens(self, tokens: int) -> int: ...
    def max_tokens(self) -> int: ...


class GraphedMicrobatches:
    """``module`` as CUDA graphs, one a shape: ``graphed(batch, hidden, **more)`` instead of ``module(hidden,
    **more)``.

    ``batch`` is T or a :class:`~ub_dynamic.PackedBatch`; graphs are kept by its ``shape_key()`` (or T), the
    shapes of the tensors and the values of the other arguments. The first call with a new key captures (a
    second or so, on every rank of the TP group together); later ones replay, forward and backward, bitwise equal
    to the module itself. Every call runs inside ``manager.microbatch(batch)``, where ranks compare T. Without
    gradients, or with the module in evaluation, it is run as it is.

    ``bucket``: T has to be a multiple of it, or the capacity, so that a few graphs serve all batches
    (:meth:`round_up`, ``PackedBatch.from_lengths(bucket=)``). ``max_graphs``: so many shapes are kept, the
    one that was not used for longest goes first. ``in_flight``: so many microbatches of one shape may be
    between their forward and the end of their backward (the pipeline depth); each costs the activations of
    one microbatch. A graph overlaps as the policy chose when it was captured, so another policy ends all graphs.

    Tensors are copied into the graph; outputs and the gradients of inputs live until the same graph is
    replayed. Parameters must keep their addresses. BF16 only: quantised modules are refused.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        manager: _Shapes,
        *,
        bucket: int | None = None,
        max_graphs: int = 8,
        in_flight: int = 1,
        warmup: int = 3,
    ) -> None:
        for value, name in ((bucket, "bucket"), (max_graphs, "max_graphs"), (in_flight, "in_flight")):
            if value is not None and value < 1:
                raise UBShapeError(f"{name} is {value}: it must be at least 1")
        self.module = module
        self.bucket, self.max_graphs, self.in_flight, self.warmup = bucket, max_graphs, in_flight, warmup
        self.captures = 0
        self.replays = 0
        self._manager = manager
        self._policy = manager.policy
        self._graphs: OrderedDict[Hashable, list[_Captured]] = OrderedDict()
        self._hooks: dict[torch.nn.Parameter, Any] = {}

    def round_up(self, tokens: int) -> int:
        """The T of the bucket that holds ``tokens``; the last bucket is the capacity."""
        if self.bucket is not None:
            tokens = min(-(-tokens // self.bucket) * self.bucket, max(tokens, self._manager.max_tokens()))
        return self._manager.round_up_tokens(tokens)

    def __call__(self, batch: Any, *tensors: torch.Tensor, **arguments: Any) -> Any:
        """Run one microbatch.

        Raises :class:`UBAlignmentError` for a T that is no bucket, :class:`UBStateError` where more
        microbatches of this shape are in flight than ``in_flight``, after the communicators were destroyed, and for
        another policy while one is in flight, and :class:`UBUnsupportedError` inside a quantised autocast.
        """
        _check_alive(self._manager)
        self._check_bucket(_tokens(batch))
        _refuse_quantised()
        if not torch.is_grad_enabled() or not self.module.training:
            with self._manager.microbatch(batch):
                return self.module(*tensors, **arguments)
        moving = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        fixed = {name: value for name, value in arguments.items() if name not in moving}
        if self._manager.policy is not self._policy:
            self.clear()
            self._policy = self._manager.policy
        with self._manager.microbatch(batch):  # a replay needs no shape, but ranks that differ in T must hear of it
            captured = self._free(batch, tensors, moving, fixed)
            output = captured.callable(*tensors, **moving)
        self.replays += 1
        _hold_until_backward(captured, output, self._manager)
        return output

    def check_idle(self) -> None:
        """:class:`UBStateError` while a graph waits for its backward, which none can any more after ``destroy_ub``."""
        if self._manager.destroyed:
            return
        if any(captured.busy for copies in self._graphs.values() for captured in copies):
            raise UBStateError("a microbatch is between its forward and its backward; its graph cannot be freed")

    def clear(self) -> None:
        """Free every graph; :class:`UBStateError`, with none freed, if one still waits for its backward."""
        self.check_idle()
        while self._graphs:
            self._evict(next(iter(self._graphs)))
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def __len__(self) -> int:
        """How many shapes are captured."""
        return len(self._graphs)

    # -- inside ----------------------------------------------------------------------------------------------

    def _check_bucket(self, tokens: int) -> None:
        if self.bucket is None or tokens % self.bucket == 0 or tokens == self._manager.max_tokens():
            return
        try:
            wanted = f"the next valid T is {self.round_up(tokens)}"
        except UBCapacityError as error:
            wanted = str(error)
        raise UBAlignmentError(f"T = {tokens} is not a multiple of bucket = {self.bucket}; {wanted}")

    def _free(self, batch: Any, tensors: Any, moving: dict[str, Any], fixed: dict[str, Any]) -> _Captured:
        """A captured callable for this shape that no microbatch uses; captured now if there is none."""
        trained = tuple(parameter.requires_grad for parameter in self.module.parameters())
        key = (_key(batch, tensors, moving, fixed), trained)
        copies = self._graphs.setdefault(key, [])
        self._graphs.move_to_end(key)
        for captured in copies:
            if not captured.busy:
                return captured
        if len(copies) >= self.in_flight:
            raise UBStateError(
                f"{len(copies)} microbatches of T = {_tokens(batch)} wait for their backward, which overwriting their "
                f"activations would break: make GraphedMicrobatches with in_flight = {len(copies) + 1} or more"
            )
        try:
            copies.append(self._capture(batch, tensors, moving, fixed))
        finally:
            if not copies:
                del self._graphs[key]
        self._make_room(key)
        return copies[-1]

    def _make_room(self, keep: Hashable) -> None:
        for key in list(self._graphs):
            if len(self._graphs) <= self.max_graphs:
                return
            if key != keep and not any(captured.busy for captured in self._graphs[key]):
                self._evict(key)

    def _evict(self, key: Hashable) -> None:
        for captured in self._graphs.pop(key):
            captured.callable.reset()

    def _capture(self, batch: Any, tensors: Any, moving: dict[str, Any], fixed: dict[str, Any]) -> _Captured:
        import transformer_engine.pytorch as te

        if torch.cuda.is_current_stream_capturing():
            raise UBStateError("a CUDA graph is being captured: capture the shapes of GraphedMicrobatches before")
        if "clone_param_grads_on_return" not in inspect.signature(te.make_graphed_callables).parameters:
            self._copy_parameter_gradients()
        graphed = ends_when_it_fails(te.make_graphed_callables)(
            _WithArguments(self.module, fixed),
            tuple(_sample(tensor) for tensor in tensors),
            num_warmup_iters=self.warmup,
            sample_kwargs={name: _sample(tensor) for name, tensor in moving.items()},
        )
        self.captures += 1
        logger.info("captured T = %d, %d shapes now", _tokens(batch), len(self._graphs))
        return _Captured(graphed)

    def _copy_parameter_gradients(self) -> None:
        """TE before 2.19 returns the graph's own gradient buffers, and accumulation adds into them."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(torch.Tensor.clone)


class _WithArguments(torch.nn.Module):
    """The module with arguments that are no tensors fixed; TE patches this object's forward, not the
    module's.
    """

    def __init__(self, module: torch.nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.arguments = arguments

    def forward(self, *tensors: torch.Tensor, **more: torch.Tensor) -> Any:
        return self.module(*tensors, **more, **self.arguments)


class _Captured:
    """A captured callable, and whether a microbatch is between its forward and the end of its backward."""

    def __init__(self, callable_: Any) -> None:
        self.callable = callable_
        self.busy = False


class _Lease:
    """Keeps a captured callable for one microbatch; ends with its backward, or with its autograd graph."""

    def __init__(self, captured: _Captured) -> None:
        self._captured: _Captured | None = captured
        captured.busy = True

    def end(self, *_gradients: object) -> None:
        if self._captured is not None:
            self._captured.busy = False
            self._captured = None

    def __del__(self) -> None:
        self.end()


def _check_alive(manager: _Shapes) -> None:
    """A graph has the addresses of the buffers in it, and would write there whatever is there by now."""
    if manager.destroyed:
        raise UBStateError(
            "the communicators are destroyed; call initialize_ub first, and make GraphedMicrobatches anew"
        )


def _hold_until_backward(captured: _Captured, output: Any, manager: _Shapes) -> None:
    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: _check_alive(manager))
            tensor.grad_fn.register_hook(_Lease(captured).end)  # all outputs come from the one node
            return


def _key(batch: Any, tensors: Any, moving: dict[str, Any], fixed: dict[str, Any]) -> Hashable:
    shape = batch.shape_key() if hasattr(batch, "shape_key") else _tokens(batch)
    surface = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in (*tensors, *moving.values()))
    key = (shape, surface, tuple(moving), tuple(fixed.items()))
    try:
        hash(key)
    except TypeError as error:
        raise UBUnsupportedError(f"arguments {list(fixed)} are neither tensors nor hashable: {error}") from error
    return key


def _refuse_quantised() -> None:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    if FP8GlobalStateManager.is_fp8_enabled():
        raise UBUnsupportedError("GraphedMicrobatches captures BF16 modules; leave the quantised autocast")


def _tokens(batch: Any) -> int:
    return int(getattr(batch, "local_tokens", getattr(batch, "total_tokens", batch)))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A buffer like ``tensor`` with its values: some arguments (boundaries of sequences) must make sense."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)

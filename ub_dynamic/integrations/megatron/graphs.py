# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs in Megatron's training step: its decoder from one graph a shape, captured by TE.

Megatron's own graphs have one shape. Here the ``forward`` of each ``TransformerBlock`` goes through
:class:`~ub_dynamic.backends.te.graphs.GraphedMicrobatches`, with the packed boundaries as tensors that a replay
copies in; embedding, loss, optimizer and transfers between stages stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch

from ... import api
from ...backends.te.graphs import GraphedMicrobatches
from ...backends.te.patches import Patches
from ...errors import UBUnsupportedError
from . import tokens
from .adapter import Adapter, adapter
from .configuration import check_settings, overlaps


class GraphedDecoder:
    """The decoders of a model that run from graphs until :meth:`remove`. ``graphs``: one cache a model chunk."""

    def __init__(self, blocks: list[torch.nn.Module], **options: Any) -> None:
        manager, shared = api.manager(), adapter()
        self._patches = Patches()
        self._shared = shared
        self.graphs: list[GraphedMicrobatches] = []
        for block in blocks:
            stored = _Block(block, shared)
            graphed = GraphedMicrobatches(stored, manager, **options)
            self._patches.add(block, "forward", _forward(block, stored, graphed, shared))
            self.graphs.append(graphed)
        shared.decoders.append(self)

    @property
    def captures(self) -> int:
        """How many graphs were captured so far."""
        return sum(each.captures for each in self.graphs)

    def round_up(self, tokens: int) -> int:
        """The T of the bucket that holds ``tokens``."""
        return self.graphs[0].round_up(tokens)

    def check_idle(self) -> None:
        """:class:`UBStateError` while a graph of any block waits for its backward."""
        for graphed in self.graphs:
            graphed.check_idle()

    def remove(self) -> None:
        """Give the blocks their forward back and free every graph; a second call does nothing.

        :class:`UBStateError`, with nothing removed, while a graph waits for its backward.
        """
        self.check_idle()
        for graphed in self.graphs:
            graphed.clear()
        self._patches.undo()
        if self in self._shared.decoders:
            self._shared.decoders.remove(self)


def graph_decoder(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    bucket: int | None = None,
    max_graphs: int = 8,
    in_flight: int = 1,
    warmup: int = 3,
) -> GraphedDecoder:
    """Run every ``TransformerBlock`` of ``model`` (or of a list of model chunks) from CUDA graphs, one a shape.

    Call it after :func:`install` and after Megatron initialised. ``in_flight``: forwards before the first backward,
    ``pp - rank`` at least in 1F1B. The rest as in :class:`GraphedMicrobatches`. A shape is T, the number of sequences,
    ``max_seqlen`` and the padding flag, so give the last three one value each (``slots``, ``max_seqlen`` and
    ``bucket`` of :meth:`PackedBatch.from_lengths`). Evaluation runs without graphs.

    Raises :class:`UBUnsupportedError` for what a graph would get wrong: a random state that CUDA graphs cannot
    advance, gradients that are added to ``main_grad`` while they are computed, quantised layers, or a configuration
    that Megatron's own graphs are on in.
    """
    blocks = [block for chunk in ([model] if isinstance(model, torch.nn.Module) else model) for block in _blocks(chunk)]
    if not blocks:
        raise UBUnsupportedError("no TransformerBlock of megatron-core is in this model")
    for block in blocks:
        _check(block)
    return GraphedDecoder(blocks, bucket=bucket, max_graphs=max_graphs, in_flight=in_flight, warmup=warmup)


class _Block(torch.nn.Module):
    """A block as a function of tensors and of values that a graph bakes in; the packed sequences are put together
    again inside."""

    def __init__(self, block: torch.nn.Module, shared: Adapter) -> None:
        super().__init__()
        self.block = block  # its parameters are this module's
        self.original: Callable[..., Any] = block.forward
        self._shared = shared
        self._kind: type | None = None

    def split(self, params: Any) -> tuple[dict[str, torch.Tensor], tuple[tuple[str, Any], ...]]:
        """The tensors of ``params``, each once, and for every field its value or the name of its tensor."""
        if params is None:
            return {}, ()
        self._kind = type(params)
        found: dict[str, torch.Tensor] = {}
        facts: list[tuple[str, Any]] = []
        for name in (field.name for field in fields(params)):
            value = getattr(params, name)
            if isinstance(value, torch.Tensor):
                same = next((known for known, tensor in found.items() if tensor is value), None)
                if same is None:
                    same, found[f"packed_{name}"] = f"packed_{name}", value
                facts.append((name, _Named(same)))
            elif value is not None:
                facts.append((name, value))
        return found, tuple(facts)

    def forward(self, hidden_states: torch.Tensor, *, packed: tuple[tuple[str, Any], ...], **arguments: Any) -> Any:
        held = {name: arguments.pop(name) for name in list(arguments) if name.startswith("packed_")}
        params = None
        if self._kind is not None and packed:
            known = {field.name for field in fields(self._kind) if field.init}
            values = {name: held[value] if isinstance(value, _Named) else value for name, value in packed}
            params = self._kind(**{name: value for name, value in values.items() if name in known})
        with self._shared.leave_alone(), _own_input(self.block, hidden_states):
            return self.original(hidden_states, packed_seq_params=params, **arguments)


class _Named(str):
    """The name of a tensor, where a field's value would stand."""

    __slots__ = ()


@contextmanager
def _own_input(block: Any, tensor: torch.Tensor) -> Iterator[None]:
    """Let a block that takes its input from ``set_input_tensor`` take ``tensor``."""
    if getattr(block, "pre_process", True):
        yield
        return
    before, block.input_tensor = block.input_tensor, tensor
    try:
        yield
    finally:
        block.input_tensor = before


def _forward(block: Any, stored: _Block, graphed: GraphedMicrobatches, shared: Adapter) -> Callable[..., Any]:
    signature = inspect.signature(stored.original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not block.training or not torch.is_grad_enabled():
            return stored.original(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        hidden = tokens.entering(block, given.pop("hidden_states"))
        params = given.pop("packed_seq_params", None)
        shape = shared.enter(block, hidden, params)
        if shape is None:
            return stored.original(*args, **kwargs)
        moving, packed = stored.split(params)
        attention_mask = given.pop("attention_mask", None)
        more = {name: value for name, value in given.items() if value is not None}
        output = graphed(shape[0], hidden, attention_mask=attention_mask, packed=packed, **more, **moving)
        return api.bind_backward(output, shape)

    return forward


def _blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    from megatron.core.transformer.transformer_block import TransformerBlock

    return (module for module in model.modules() if isinstance(module, TransformerBlock))


def _check(block: Any) -> None:
    if not overlaps(block):
        raise UBUnsupportedError("tp_comm_overlap is off, so no graph needs a shape: use Megatron's own CUDA graphs")
    config = block.config
    check_settings(config)
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        raise UBUnsupportedError("fp8 and fp4 layers keep scales between microbatches; graphs a shape are for BF16")
    if getattr(config, "gradient_accumulation_fusion", False):
        raise UBUnsupportedError(
            "gradient_accumulation_fusion = True: Megatron's hooks would take the graph's gradient for one that they "
            "still have to add; set it to False"
        )
    if config.sequence_parallel and not _random_state_is_graphable():
        raise UBUnsupportedError(
            "Megatron's random state tracker cannot be used inside a CUDA graph: call "
            "model_parallel_cuda_manual_seed(seed, te_rng_tracker=True)"
        )


def _random_state_is_graphable() -> bool:
    """TE's capture advances the states of its own tracker only."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

    return isinstance(get_cuda_rng_tracker(), CudaRNGStatesTracker)

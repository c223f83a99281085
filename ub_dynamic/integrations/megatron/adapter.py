# SPDX-License-Identifier: Apache-2.0
"""Puts the active shape behind Megatron's own functions, and takes it back without a trace.

Three things are wrapped. The ``forward`` of each block of layers sets T from its input and binds its backward.
``schedules.forward_step``, which every pipeline schedule calls for each microbatch, binds the whole microbatch, so
that what lies behind the last block sees the same T. The combined 1F1B schedules refuse. A wrapper of somebody else may
keep one of these beyond :func:`uninstall`; it does nothing then.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

from ... import api
from ...backends.te.patches import Patches
from ...cp.pad_flag import Policy, check_policy
from ...errors import UBStateError, UBUnsupportedError
from ...shapes import Shape
from . import tokens
from .configuration import COMBINED, check_config, check_settings, overlaps, refuse
from .pad import PadFlags

KNOWN = "0.16.1 and 0.19.2"  # the versions that this was written against
# Every block of layers that Megatron has, by the module it is in. Only the first is in all versions.
BLOCKS = (
    ("transformer.transformer_block", "TransformerBlock"),
    ("transformer.multi_token_prediction", "MultiTokenPredictionLayer"),
    ("ssm.mamba_block", "MambaStack"),
    ("models.hybrid.hybrid_block", "HybridStack"),
)
_SCHEDULES = "pipeline_parallel.schedules"
_COMBINED = ("combined_1f1b_schedule_for_no_pipelining", "combined_1f1b_schedule_for_interleaved_pipelining")


class Removable(Protocol):
    """A :class:`~ub_dynamic.integrations.megatron.graphs.GraphedDecoder`."""

    def check_idle(self) -> None: ...

    def remove(self) -> None: ...


class Adapter:
    """What the wrappers share: the pad flags, and T of the microbatch whose forward is under way.

    ``decoders``: what runs blocks from graphs, and has to be removed with the wrappers.
    """

    def __init__(self, pad: PadFlags) -> None:
        self.pad = pad
        self.decoders: list[Removable] = []
        self._shape: Shape | None = None
        self._away = False

    @contextmanager
    def leave_alone(self) -> Iterator[None]:
        """Blocks that run inside do not change the active shape: a graph of them is being captured."""
        self._away = True
        try:
            yield
        finally:
            self._away = False

    def enter(self, block: Any, hidden_states: Any, packed_seq_params: Any) -> Shape | None:
        """Make T of a block's input the active one; None, and nothing done, where the block has no TP overlap or this
        adapter was taken back."""
        config = block.config
        if self._away or self is not _adapter or not api.is_ub_initialized() or not overlaps(block):
            return None
        check_settings(config)
        shape = tokens.shape_of(tokens.entering(block, hidden_states), config)
        self.pad.fill(packed_seq_params, shape[0], config)
        api.set_ub_active_shape(shape)
        self._shape = shape
        return shape

    def _forget(self) -> None:
        self._shape = None

    def wrap_block(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hidden_at, params_at = _places(original, "hidden_states", "packed_seq_params")

        @functools.wraps(original)
        def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = args[hidden_at] if len(args) > hidden_at else kwargs.get("hidden_states")
            params = args[params_at] if len(args) > params_at else kwargs.get("packed_seq_params")
            shape = self.enter(block, hidden, params)
            output = original(block, *args, **kwargs)
            return output if shape is None else api.bind_backward(output, shape)

        return forward

    def wrap_forward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            self._forget()
            result = original(*args, **kwargs)
            if self._shape is not None and api.is_ub_initialized():
                api.bind_backward(result, self._shape)  # an output tensor, or a list of them, and a token count
            return result

        return forward_step


_patches = Patches()
_adapter: Adapter | None = None


def install(config: Any = None, *, pad_policy: Policy = "conservative", **options: Any) -> None:
    """Give megatron-core's TP overlap a T per microbatch. Call it before Megatron initialises its UserBuffers.

    Nothing else in a training script changes: Megatron's ``initialize_ub`` call registers
    ``[seq_length * micro_batch_size // cp, hidden_size]``, which is the capacity, and every microbatch may have a T of
    at most that. ``config``: refuse now what :func:`check_config` refuses; it is asked again for each block that runs.
    ``pad_policy``: as ``policy`` of :class:`~ub_dynamic.cp.pad_flag.PadResolver`. ``options``: those of
    :func:`ub_dynamic.install` (``check``, ``guard``, ``auto``).

    A second call replaces the first. Raises :class:`UBUnsupportedError`, with nothing replaced, without megatron-core,
    for a version that lacks what would be replaced, and for what ``config`` has; :class:`UBStateError` where TE's
    UserBuffers were initialised without this package, and while a ``graph_decoder`` of the first call runs; and what
    the arguments are refused with.
    """
    global _adapter
    if config is not None:
        check_config(config)
    check_policy(pad_policy)
    _refuse_stock_userbuffers()
    if _adapter is not None and _adapter.decoders:
        raise UBStateError("blocks run from graphs of graph_decoder: call its remove(), or uninstall(), first")
    core = _import("", required=True)
    assert core is not None
    api.install(**options)
    _take_back()
    try:
        params = getattr(_import("packed_seq_params", required=True), "PackedSeqParams", None)
        if params is None:
            raise UBUnsupportedError("packed_seq_params has no PackedSeqParams")
        adapter = Adapter(PadFlags(params, pad_policy))
        _adapter = adapter
        for owner in _blocks():
            _patches.replace(owner, "forward", adapter.wrap_block)
        schedules = _import(_SCHEDULES, required=True)
        _patches.replace(schedules, "forward_step", adapter.wrap_forward_step)
        for name in _COMBINED:
            if hasattr(schedules, name):
                _patches.replace(schedules, name, _refuse_combined)
    except Exception as error:
        _take_back()
        api.uninstall()
        if not isinstance(error, UBUnsupportedError):
            raise
        raise UBUnsupportedError(f"megatron-core {_version(core)}: {error}; {KNOWN} are known to work") from error


def uninstall() -> list[str]:
    """Give Megatron and TE their names back; returns those that somebody else has replaced since :func:`install`.

    What ``graph_decoder`` made is removed too; :class:`UBStateError`, with nothing taken back, while a graph waits for
    its backward.
    """
    return _take_back() + api.uninstall() if _adapter is not None else []


def _take_back() -> list[str]:
    """Megatron's part of :func:`uninstall`."""
    global _adapter
    if _adapter is None:
        return []
    for decoder in _adapter.decoders:
        decoder.check_idle()
    for decoder in tuple(_adapter.decoders):
        decoder.remove()
    _adapter.pad.remove()
    _adapter = None
    return _patches.undo()


def is_installed() -> bool:
    """Whether Megatron's functions are wrapped."""
    return _adapter is not None


def adapter() -> Adapter:
    """What :func:`install` made; :class:`UBStateError` before it."""
    if _adapter is None:
        raise UBStateError("call ub_dynamic.integrations.megatron.install() first")
    return _adapter


def _blocks() -> Iterable[type]:
    found: list[type] = []
    for number, (where, name) in enumerate(BLOCKS):
        module = _import(where, required=number == 0)
        owner = getattr(module, name, None)
        # An alias, or a subclass without a forward of its own, comes through the class that has it.
        if owner is not None and "forward" in vars(owner):
            found += [] if owner in found else [owner]
        elif number == 0:
            raise UBUnsupportedError(f"{where} has no {name} with a forward of its own")
    return found


def _import(name: str, *, required: bool) -> ModuleType | None:
    path = f"megatron.core.{name}" if name else "megatron.core"
    try:
        return importlib.import_module(path)
    except ImportError as error:
        if not required:
            return None
        raise UBUnsupportedError(
            f"{path} does not import: pip install 'ub_dynamic[megatron]' ({error}); {KNOWN} are known to work"
        ) from error


def _version(core: ModuleType) -> str:
    return str(getattr(core, "__version__", "of an unknown version"))


def _refuse_stock_userbuffers() -> None:
    try:
        base = importlib.import_module("transformer_engine.pytorch.module.base")
    except ImportError as error:
        raise UBUnsupportedError(
            f"Transformer Engine does not import: pip install 'ub_dynamic[te]' ({error})"
        ) from error
    if vars(base).get("_ub_communicators") is not None and not api.is_ub_initialized():
        raise UBStateError(
            "TE's UserBuffers are already initialised, for one shape only: call install() before Megatron initialises"
        )


def _places(forward: Callable[..., Any], *names: str) -> list[int]:
    """Where a method's arguments stand, not counting self; past all others for one that goes by name only."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    known = [parameter.name for parameter in parameters]
    if missing := [name for name in names if name not in known]:
        raise UBUnsupportedError(f"{forward.__qualname__} does not take {', '.join(missing)}")
    positional = [each.name for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    return [positional.index(name) if name in positional else len(known) for name in names]


def _refuse_combined(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        if is_installed() and api.is_ub_initialized():
            refuse("overlap_moe_expert_parallel_comm", True, COMBINED)
        return original(*args, **kwargs)

    return schedule

# SPDX-License-Identifier: Apache-2.0
"""Puts this package behind Transformer Engine's own names, and takes it back without a trace.

``initialize_ub`` and ``destroy_ub`` are reached by three paths (``te``, ``te.module``, ``te.module.base``: Megatron
uses the last two), so all three are replaced. ``te.set_ub_active_shape`` and the per-communicator methods have the
names that TE issue #3564 proposes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ...errors import UBUnsupportedError
from .patches import Patches

_patches = Patches()


def install(
    *,
    initialize_ub: Callable[..., Any],
    destroy_ub: Callable[[], Any],
    set_ub_active_shape: Callable[..., Any],
    set_buffer_active_shape: Callable[[Any, Any], Any],
    get_buffer_active_shape: Callable[[Any], Any],
    get_buffer_capacity_shape: Callable[[Any], Any],
) -> None:
    """Make TE's names call these functions; a second call does nothing.

    ``initialize_ub`` is called with those of TE's arguments that the caller gave, by name. Raises
    :class:`UBUnsupportedError`, with nothing replaced, if this TE does not have what would be replaced.
    """
    if _patches:
        return
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    try:
        for owner in (te, te.module, te.module.base):
            _patches.replace(owner, "initialize_ub", functools.partial(_initialize, ours=initialize_ub))
            _patches.replace(owner, "destroy_ub", functools.partial(_destroy, ours=destroy_ub))
        _patches.add(te, "set_ub_active_shape", set_ub_active_shape)
        for kind in (tex.CommOverlap, tex.CommOverlapP2P):
            _patches.add(kind, "set_buffer_active_shape", _method(set_buffer_active_shape))
            _patches.add(kind, "get_buffer_active_shape", _method(get_buffer_active_shape))
            _patches.add(kind, "get_buffer_capacity_shape", _method(get_buffer_capacity_shape))
    except BaseException:
        _patches.undo()
        raise


def uninstall() -> list[str]:
    """Give TE its names back. Returns those that somebody else has replaced since, which are left as they are."""
    return _patches.undo()


def is_installed() -> bool:
    """Whether TE's names call this package."""
    return bool(_patches)


def stock(name: str) -> Callable[..., Any]:
    """TE's own ``initialize_ub`` or ``destroy_ub``, whether this package is installed over it or not."""
    import transformer_engine.pytorch.module.base as base

    function: Callable[..., Any] = _patches.original(base, name)
    return function


def _initialize(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    known = inspect.signature(ours).parameters

    @functools.wraps(original)
    def initialize_ub(*args: Any, **kwargs: Any) -> None:
        # This package's keywords (check, guard, auto) may come along; TE's signature checks the rest.
        own = {name for name in kwargs if name in known and name not in signature.parameters}
        given = signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in own}).arguments
        if unknown := given.keys() - known.keys():
            raise UBUnsupportedError(f"initialize_ub: this package does not know TE's argument {sorted(unknown)}")
        ours(**given, **{name: kwargs[name] for name in own})

    return initialize_ub


def _destroy(original: Callable[..., Any], ours: Callable[[], Any]) -> Callable[[], None]:
    @functools.wraps(original)
    def destroy_ub() -> None:
        ours()

    return destroy_ub


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any) -> Any:
        return function(self, *args)

    return method

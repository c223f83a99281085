# SPDX-License-Identifier: Apache-2.0
"""Puts this package behind Transformer Engine's own names, and takes it back without a trace.

``initialize_ub`` and ``destroy_ub`` are reached by three paths (``te``, ``te.module``, ``te.module.base``: Megatron
uses the last two), so all three are replaced. ``te.set_ub_active_shape`` and the per-communicator methods have the
names that TE issue #3564 proposes.

A wrapper of somebody else may keep one of these functions beyond :func:`uninstall`. It then does what the function
did that it stands before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ...errors import UBUnsupportedError
from .patches import Patches

_patches = Patches()
_endings = Patches()  # of destroy_ub: while installed, and while communicators of this package live
_held = False
_ours: dict[str, Callable[..., Any]] = {}  # what the wrappers of the present installation call


def install(
    *,
    initialize_ub: Callable[..., Any],
    destroy_ub: Callable[[], bool],
    set_ub_active_shape: Callable[..., Any],
    set_buffer_active_shape: Callable[[Any, Any], Any],
    get_buffer_active_shape: Callable[[Any], Any],
    get_buffer_capacity_shape: Callable[[Any], Any],
) -> None:
    """Make TE's names call these functions; a second call replaces ``initialize_ub`` alone.

    ``initialize_ub`` is called with those of TE's arguments that the caller gave. ``destroy_ub`` returns whether
    communicators of this package were there to be released; if not, TE's own is called. Raises
    :class:`UBUnsupportedError`, with nothing replaced, if this TE does not have what would be replaced.
    """
    global _ours
    if _patches:
        _ours["initialize_ub"] = initialize_ub
        return
    owners, kinds = _owners(), _kinds()
    ours = {"initialize_ub": initialize_ub}
    try:
        for owner in owners:
            _patches.replace(owner, "initialize_ub", functools.partial(_initialize, ours=ours))
        _patches.add(owners[0], "set_ub_active_shape", set_ub_active_shape)
        for kind in kinds:
            _patches.add(kind, "set_buffer_active_shape", _method(set_buffer_active_shape))
            _patches.add(kind, "get_buffer_active_shape", _method(get_buffer_active_shape))
            _patches.add(kind, "get_buffer_capacity_shape", _method(get_buffer_capacity_shape))
        _replace_destroy(destroy_ub)
    except BaseException:
        _patches.undo()
        raise
    _ours = ours


def uninstall() -> list[str]:
    """Give TE its names back. Returns those that somebody else has replaced since, which are left as they are.

    ``destroy_ub`` follows at :func:`release` where communicators of this package live.
    """
    _ours.clear()
    return _patches.undo() + ([] if _held else _endings.undo())


def hold(destroy_ub: Callable[[], bool]) -> None:
    """Make TE's ``destroy_ub`` call this one, as :func:`install` does, until :func:`release`.

    TE's own would destroy the communicators under the manager that watches over them.
    """
    global _held
    _replace_destroy(destroy_ub)
    _held = True


def release() -> None:
    """The communicators are gone: TE's ``destroy_ub`` is its own again, unless this package is installed."""
    global _held
    _held = False
    if not _patches:
        _endings.undo()


def is_installed() -> bool:
    """Whether TE's names call this package."""
    return bool(_patches)


def stock(name: str) -> Callable[..., Any]:
    """TE's own ``initialize_ub`` or ``destroy_ub``, whether this package is installed over it or not."""
    import transformer_engine.pytorch.module.base as base

    function: Callable[..., Any] = (_endings if name == "destroy_ub" else _patches).original(base, name)
    return function


def _owners() -> tuple[Any, ...]:
    """The three paths to TE's functions."""
    try:
        import transformer_engine.pytorch as te

        return te, te.module, te.module.base
    except (ImportError, AttributeError) as error:
        raise UBUnsupportedError(f"Transformer Engine does not import as it is known: {error}") from error


def _kinds() -> tuple[type, ...]:
    """TE's classes of communicators."""
    try:
        import transformer_engine_torch as tex

        return tex.CommOverlap, tex.CommOverlapP2P
    except (ImportError, AttributeError) as error:
        raise UBUnsupportedError(f"this Transformer Engine has no UserBuffers as they are known: {error}") from error


def _replace_destroy(ours: Callable[[], bool]) -> None:
    if _endings:
        return
    try:
        for owner in _owners():
            _endings.replace(owner, "destroy_ub", functools.partial(_destroy, ours=ours))
    except BaseException:
        _endings.undo()
        raise


def _initialize(original: Callable[..., Any], ours: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())

    @functools.wraps(original)
    def initialize_ub(*args: Any, **kwargs: Any) -> None:
        function = ours.get("initialize_ub")
        if function is None:  # uninstalled
            original(*args, **kwargs)
        elif open_ended:  # somebody's wrapper, whose signature says nothing: this package's begins with TE's
            function(*args, **kwargs)
        else:
            function(**_bind(signature, inspect.signature(function), args, kwargs))

    return initialize_ub


def _bind(
    signature: inspect.Signature, ours: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments by name. This package's keywords (check, guard, auto) may come along; TE's signature checks the
    rest."""
    own = {k: v for k, v in kwargs.items() if k in ours.parameters and k not in signature.parameters}
    given = signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in own}).arguments
    if unknown := given.keys() - ours.parameters.keys():
        raise UBUnsupportedError(f"initialize_ub: this package does not know TE's argument {sorted(unknown)}")
    return given | own


def _destroy(original: Callable[..., Any], ours: Callable[[], bool]) -> Callable[[], None]:
    @functools.wraps(original)
    def destroy_ub() -> None:
        if not ours():
            original()

    return destroy_ub


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any) -> Any:
        return function(self, *args)

    return method

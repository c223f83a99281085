# SPDX-License-Identifier: Apache-2.0
"""Ends TE's communicators so that the next ``initialize_ub`` starts from nothing.

All communicator objects of a process share one native communicator, and the first object that dies destroys it. An
object that somebody still holds after ``destroy_ub`` would therefore destroy the NEXT shared communicator when it
dies at last, while other objects use that one. Its destructor cannot be switched off, so such a survivor is named
and given one reference that is never returned: its streams and events leak, its memory is freed with the rest.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ...groups import Group
from .communicators import communicator_name
from .install import stock

logger = logging.getLogger("ub_dynamic")


@dataclass
class Bootstrap:
    """What TE's ``initialize_ub`` makes for the shared communicator: its helper, and the helper's process groups.

    ``usual``: the keywords that TE gave its last ``CommOverlap``.
    """

    helper: Any = None
    groups: tuple[Any, ...] = ()
    usual: dict[str, Any] = field(default_factory=dict)

    def release(self, group: Group) -> None:
        """Drop the helper and end its groups, which TE makes anew each time, and leaves behind."""
        self.helper = None
        shared = (dist.group.WORLD, getattr(group, "process_group", None))
        for made in {id(each): each for each in self.groups}.values():
            if not any(made is other for other in shared):
                dist.destroy_process_group(made)
        self.groups = ()


def destroy_communicators(
    references: Mapping[str, weakref.ref[Any]], group: Group, native: ModuleType | None, bootstrap: Bootstrap
) -> list[str]:
    """Synchronise, wait for the group, destroy, and deal with survivors; returns their names.

    :class:`UBTimeoutError` names the ranks that did not come; this rank's communicators are destroyed even then.
    """
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        group.barrier("destroying the communicators")
    finally:
        survivors = destroy_objects(references, native)
        bootstrap.release(group)
    group.barrier("having destroyed the communicators")
    return survivors


def destroy_objects(references: Mapping[str, weakref.ref[Any]], native: ModuleType | None) -> list[str]:
    """Destroy the communicators of this rank, without a look at the others; returns the names of survivors."""
    references = {**added_later(references), **references}
    stock("destroy_ub")()
    if any(reference() is not None for reference in references.values()):
        gc.collect()  # a cycle, such as a traceback's, is no owner
        release_from_nodes(references)
    survivors = [name for name, reference in references.items() if reference() is not None]
    if survivors:
        held = holders({name: references[name] for name in survivors})
        logger.warning(
            "still held after destroy_ub: %s. These objects are kept from ever being destroyed, since they would take "
            "the next communicators with them; hold communicators by name instead",
            "; ".join(f"{name} by {text}" for name, text in held.items()),
        )
    for name in survivors:
        if native is not None:
            native.bury(references[name]())
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(references[name]()))
    if native is not None and native.shared_exists():
        native.destroy_shared()
    return survivors


def added_later(references: Mapping[str, weakref.ref[Any]]) -> dict[str, weakref.ref[Any]]:
    """What else stands in TE's table: communicators that somebody made with the helper after initialisation."""
    import transformer_engine.pytorch.module.base as base

    known = {id(reference()) for reference in references.values()}
    table = vars(base).get("_ub_communicators") or {}
    return {communicator_name(key): weakref.ref(comm) for key, comm in table.items() if id(comm) not in known}


def release_from_nodes(references: Mapping[str, weakref.ref[Any]]) -> None:
    """Take these objects from autograd's nodes: TE's backward leaves the communicator that it used there
    (``ctx.ub_obj_gradout``), and the nodes live as long as the loss does. Nothing can use them any more.
    """
    for reference in references.values():
        comm = reference()
        for attributes in () if comm is None else gc.get_referrers(comm):
            owner = _owner(attributes) if isinstance(attributes, dict) else None
            if isinstance(owner, torch.autograd.function.BackwardCFunction):
                for name in [name for name, value in attributes.items() if value is comm]:
                    attributes[name] = None


def _owner(attributes: dict[str, Any]) -> object | None:
    """The object whose ``__dict__`` this is, or None."""
    for candidate in gc.get_referrers(attributes):
        if getattr(candidate, "__dict__", None) is attributes:
            return candidate
    return None


def holders(references: Mapping[str, weakref.ref[Any]]) -> dict[str, str]:
    """Who refers to each object, as well as Python can tell: variables, containers by type and variable."""
    # Before variables are read: reading a frame's makes a dict of them, which would be found as a holder.
    referrers = {name: gc.get_referrers(reference()) for name, reference in references.items()}
    names, namespaces = _variables()
    found = {}
    for name, reference in references.items():
        texts = [f"variable {where}" for where in names.get(id(reference()), ())]
        for holder in referrers[name]:
            if isinstance(holder, types.FrameType) or id(holder) in namespaces:
                continue  # named above
            owner = (_owner(holder) if isinstance(holder, dict) else None) or holder
            where = names.get(id(owner))
            texts.append(f"a {type(owner).__name__}" + (f" in variable {where[0]}" if where else ""))
        found[name] = ", ".join(texts) or "native code"
    return found


def _variables() -> tuple[dict[int, list[str]], set[int]]:
    """The names of every object that a variable holds, by id, and the ids of the modules' namespaces: global variables
    of every module, local ones of every running function outside this file."""
    names: dict[int, list[str]] = {}
    namespaces = set()
    for module_name, module in tuple(sys.modules.items()):
        namespaces.add(id(vars(module)))
        for name, value in tuple(vars(module).items()):
            names.setdefault(id(value), []).append(f"{name} of {module_name}")
    for frame in sys._current_frames().values():
        current: types.FrameType | None = frame
        while current is not None:
            code = current.f_code
            if code.co_filename != __file__ and code.co_name != "<module>":
                where = f"{code.co_name} ({code.co_filename}:{current.f_lineno})"
                for name, value in tuple(current.f_locals.items()):
                    names.setdefault(id(value), []).append(f"{name} of {where}")
            current = current.f_back
    return names, namespaces

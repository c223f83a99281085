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
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ...groups import Group
from .install import stock

logger = logging.getLogger("ub_dynamic")


@dataclass
class Bootstrap:
    """What TE's ``initialize_ub`` makes for the shared communicator: its helper, and the helper's process groups."""

    helper: Any = None
    groups: tuple[Any, ...] = ()

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
    stock("destroy_ub")()
    if any(reference() is not None for reference in references.values()):
        gc.collect()  # a cycle, such as a traceback's, is no owner
    survivors = [name for name, reference in references.items() if reference() is not None]
    if survivors:
        logger.warning(
            "still held after destroy_ub: %s. These objects are kept from ever being destroyed, since they would take "
            "the next communicators with them; hold communicators by name instead",
            "; ".join(f"{name} by {', '.join(holders(references[name])) or 'native code'}" for name in survivors),
        )
    for name in survivors:
        if native is not None:
            native.bury(references[name]())
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(references[name]()))
    if native is not None and native.shared_exists():
        native.destroy_shared()
    return survivors


def holders(reference: weakref.ref[Any]) -> list[str]:
    """Who refers to an object, as well as Python can tell: variables, containers by type and variable."""
    target = reference()
    # First, and without a closure over it: reading f_locals and cells of comprehensions would be found as holders.
    referrers = gc.get_referrers(target)
    found = [f"variable {where}" for where in _names_of(target)]
    for holder in referrers:
        if isinstance(holder, types.FrameType) or _is_namespace(holder):
            continue
        names = _names_of(holder)
        found.append(f"a {type(holder).__name__}" + (f" in variable {names[0]}" if names else ""))
    return found


def _names_of(value: object) -> list[str]:
    return [where for where, held in _variables() if held is value]


def _is_namespace(holder: object) -> bool:
    return isinstance(holder, dict) and any(vars(module) is holder for module in tuple(sys.modules.values()))


def _variables() -> list[tuple[str, object]]:
    """Global variables of every module, and local ones of every running function outside this file."""
    found: list[tuple[str, object]] = []
    for module_name, module in tuple(sys.modules.items()):
        found += [(f"{name} of {module_name}", value) for name, value in tuple(vars(module).items())]
    for frame in sys._current_frames().values():
        current: types.FrameType | None = frame
        while current is not None:
            code = current.f_code
            if code.co_filename != __file__ and code.co_name != "<module>":
                where = f"{code.co_name} ({code.co_filename}:{current.f_lineno})"
                found += [(f"{name} of {where}", value) for name, value in tuple(current.f_locals.items())]
            current = current.f_back
    return found

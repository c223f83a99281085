# SPDX-License-Identifier: Apache-2.0
"""``with``: an active shape for the length of a block, and after it what was before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from .errors import UBDynamicError, UBStateError
from .shapes import Shape

Entered = TypeVar("Entered")
Output = TypeVar("Output")


class Settable(Protocol):
    """What a scope needs of the manager."""

    def set_active_shape(self, shape: Iterable[int]) -> Any: ...

    def standing_shapes(self) -> tuple[Shape, Mapping[str, int]]: ...

    def restore_shapes(self, shape: Shape, single: Mapping[str, int], given_up: bool = False) -> None: ...

    def bind_backward(self, output: Output, shape: Iterable[int]) -> Output: ...


class Scope(Generic[Entered]):
    """What ``with manager.active_shape(...)`` and ``with manager.microbatch(...)`` enter; for one block.

    Gives ``handle`` to the block, or what ``set_active_shape`` reports. A class, since the frames of a generator take
    longer than the change of shape itself.
    """

    __slots__ = ("_before", "_handle", "_manager", "_shape")

    def __init__(self, manager: Settable, shape: Iterable[int], handle: Entered | None = None) -> None:
        self._manager, self._shape, self._handle = manager, shape, handle
        self._before: tuple[Shape, Mapping[str, int]] | None = None

    def __enter__(self) -> Entered:
        if self._before is not None:
            raise UBStateError("this scope of a shape was entered already: make one for each block")
        before = self._manager.standing_shapes()
        report: Entered = self._manager.set_active_shape(self._shape)
        self._before = before
        return report if self._handle is None else self._handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._before is not None
        try:
            self._manager.restore_shapes(*self._before, given_up=kind is not None)
        except UBDynamicError:
            # What ended the block says more than that the shape cannot be restored, which after a failed overlap it
            # often cannot.
            if kind is None:
                raise


class Microbatch:
    """The handle of :meth:`Manager.microbatch`: ``tokens``, ``shape``, and the binding of the backward."""

    def __init__(self, manager: Settable, shape: Shape) -> None:
        self._manager = manager
        self.shape = shape
        self.tokens = shape[0]

    def bind_backward(self, output: Output) -> Output:
        """Let the backward of ``output`` (a tensor, or tensors in a list, tuple or dict) see this microbatch's T."""
        return self._manager.bind_backward(output, self.shape)

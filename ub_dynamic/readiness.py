# SPDX-License-Identifier: Apache-2.0
"""All ranks of the world say whether they are ready for TE's constructor, in which each waits for every other."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from .errors import UBRankMismatchError, UBTimeoutError
from .groups import TorchGroup, bootstrap_timeout_s

_WHAT = "telling all ranks of the world who is ready for initialize_ub"


class Readiness:
    """``with Readiness(world) as ready: ...; ready.confirm(); ...``: an error before ``confirm`` is told to the others.

    TP groups compare their arguments apart from each other, so a refusal in one is known in that one alone. ``world``
    is closed at the end; None, where there are no other ranks, needs nobody to be told.
    """

    def __init__(self, world: TorchGroup | None) -> None:
        self._world, self._told = world, False

    def confirm(self) -> None:
        """This rank is ready; :class:`UBRankMismatchError` with the reasons of those that are not."""
        told = self._tell(None)
        if refused := [f"rank {rank}: {text}" for rank, text in told if text is not None]:
            raise UBRankMismatchError(f"initialize_ub was refused on {'; '.join(refused)}")

    def __enter__(self) -> Readiness:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is not None and not self._told:
                with contextlib.suppress(UBTimeoutError):  # the error itself says more
                    self._tell(str(error) or type(error).__name__)
        finally:
            if self._world is not None:
                self._world.close()

    def _tell(self, text: str | None) -> list[tuple[int, Any]]:
        self._told = True
        if self._world is None:
            return []
        self._world.meet(_WHAT, bootstrap_timeout_s())
        return list(zip(self._world.members, self._world.allgather(text, _WHAT), strict=True))

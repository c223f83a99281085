# SPDX-License-Identifier: Apache-2.0
"""One MPI rank that fails must not leave the others waiting: it prints its error, then ends the whole run.

MPI has no way to tell the others that a rank has left: they would wait in ``MPI_Finalize`` for ever. The hook
chains the one that was there, and :func:`uninstall` puts that one back.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from types import TracebackType

from ...groups import Group, MPIGroup

# Time for the other ranks, so that each prints an error of its own before the run is ended.
_GRACE_S = 2.0

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class AbortOnError:
    """Installed while a host backend over MPI exists; ``failed()`` says whether an operation of it has failed."""

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed, self._installed = failed, True
        self._previous: Hook = sys.excepthook
        sys.excepthook = self._hook
        atexit.register(self._at_exit)

    def uninstall(self) -> None:
        """Put the previous hook back; one that somebody has set on top stays, and this one only passes on."""
        self._installed = False
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous
        atexit.unregister(self._at_exit)

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._previous(kind, error, trace)
        if self._installed:
            _abort()

    def _at_exit(self) -> None:
        # The program caught the error and goes on to its end; MPI_Finalize would wait for the others.
        if self._failed():
            _abort()


def abort_on_error(group: Group, failed: Callable[[], bool]) -> AbortOnError | None:
    """Install for a group over MPI; torchrun ends the other ranks by itself."""
    return AbortOnError(failed) if isinstance(group, MPIGroup) else None


def _abort() -> None:
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_GRACE_S)
    MPI.COMM_WORLD.Abort(1)

# SPDX-License-Identifier: Apache-2.0
"""Neighbours in a ring of a process group: send to the next rank while receiving from the one before."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UBTimeoutError
from ..groups import setup_timeout_s


class Transfer:
    """A tensor on its way in. :meth:`wait` returns it; until then neither tensor may be written."""

    def __init__(self, requests: list[Any], sent: torch.Tensor, received: torch.Tensor, peers: str) -> None:
        self._requests, self._sent, self._received, self._peers = requests, sent, received, peers

    def wait(self) -> torch.Tensor:
        """The received tensor: on CUDA the current stream waits, on the host the caller, with a timeout."""
        for request in self._requests:
            timed_wait(request, self._received, self._peers)
        self._requests = []
        return self._received


class Ring:
    """This rank's place in ``group`` (None: a ring of one, which never sends)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        members = [] if group is None else dist.get_process_group_ranks(group)
        self._next = members[(self.rank + 1) % self.size] if self.size > 1 else -1
        self._previous = members[(self.rank - 1) % self.size] if self.size > 1 else -1

    def shift(self, tensor: torch.Tensor) -> Transfer:
        """Start to send contiguous ``tensor`` to the next rank and to receive as much from the one before."""
        received = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, self._next, self.group),
            dist.P2POp(dist.irecv, received, self._previous, self.group),
        ]
        peers = f"a ring transfer to rank {self._next} and from rank {self._previous}"
        return Transfer(dist.batch_isend_irecv(operations), tensor, received, peers)


def timed_wait(request: Any, tensor: torch.Tensor, what: str) -> None:
    """Wait for a request on ``tensor``: at most ``setup_timeout_s()`` on the host; on CUDA only the stream waits,
    and the process group's own watchdog ends what does not come."""
    if tensor.is_cuda:
        request.wait()
        return
    seconds = setup_timeout_s()
    try:
        request.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise UBTimeoutError(
            f"rank {dist.get_rank()} waited {seconds:g} s for {what}; UB_DYNAMIC_TIMEOUT sets the wait in "
            f"seconds: {error}"
        ) from error

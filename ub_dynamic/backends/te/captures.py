# SPDX-License-Identifier: Apache-2.0
"""Whether a CUDA graph is being captured, known without asking CUDA.

A graph keeps the sizes of the shape it was captured at, so the shape must not change in the middle of a capture.
Asking the stream would be a CUDA call for every change of shape; torch begins and ends every capture through two
methods of ``CUDAGraph``, which are counted instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .patches import Patches


class Captures:
    """Counts the captures under way, while its wrappers are installed."""

    def __init__(self) -> None:
        self._count = 0
        self._te: Callable[[], bool] | None = None
        self._watching = False

    def watch(self, patches: Patches) -> None:
        """Count from now on; ``patches`` takes it back."""
        import transformer_engine.pytorch.graph as graph

        patches.replace(torch.cuda.CUDAGraph, "capture_begin", self._wrap_begin)
        patches.replace(torch.cuda.CUDAGraph, "capture_end", self._wrap_end)
        # TE's make_graphed_callables sets this for its warm-up runs too, which must have the shape of the capture.
        self._te = getattr(graph, "is_graph_capturing", None)
        self._count, self._watching = 0, True

    def stop(self) -> None:
        """The wrappers are gone."""
        self._watching = False

    def active(self) -> bool:
        """Whether a capture is under way; asks CUDA only where nothing is counted."""
        if self._watching:
            return self._count > 0 or (self._te is not None and self._te())
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def _wrap_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            self._count += 1
            return result

        return capture_begin

    def _wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._count = max(0, self._count - 1)
            return original(graph, *args, **kwargs)

        return capture_end

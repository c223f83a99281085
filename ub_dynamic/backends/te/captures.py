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

_CAPTURES, _UNWATCHED = "captures", "nobody counts them"


class Captures:
    """Counts the captures under way, while its wrappers are installed.

    ``under_way`` is empty if there is none, for native code to look at; ``te`` says so of TE's own, or is None.
    """

    def __init__(self) -> None:
        import transformer_engine.pytorch.graph as graph

        self.under_way: dict[str, int] = {_UNWATCHED: 1}
        # TE's make_graphed_callables sets this for its warm-up runs too, which must have the shape of the capture.
        self.te: Callable[[], bool] | None = getattr(graph, "is_graph_capturing", None)

    def watch(self, patches: Patches) -> None:
        """Count from now on; ``patches`` takes it back."""
        import transformer_engine.pytorch as te
        import transformer_engine.pytorch.graph as graph

        patches.replace(torch.cuda.CUDAGraph, "capture_begin", self._wrap_begin)
        patches.replace(torch.cuda.CUDAGraph, "capture_end", self._wrap_end)
        for module in (te, graph):
            patches.replace(module, "make_graphed_callables", ends_when_it_fails)
        self.under_way.clear()

    def stop(self) -> None:
        """The wrappers are gone."""
        self.under_way[_UNWATCHED] = 1

    def active(self) -> bool:
        """Whether a capture is under way; asks CUDA only where nothing is counted."""
        if _UNWATCHED not in self.under_way:
            return bool(self.under_way) or (self.te is not None and self.te())
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def _wrap_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            self.under_way[_CAPTURES] = self.under_way.get(_CAPTURES, 0) + 1
            return result

        return capture_begin

    def _wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            left = self.under_way.pop(_CAPTURES, 0) - 1
            if left > 0:
                self.under_way[_CAPTURES] = left
            return original(graph, *args, **kwargs)

        return capture_end


def ends_when_it_fails(make_graphed_callables: Callable[..., Any]) -> Callable[..., Any]:
    """TE's function, which says that it captures until it returns, made to say so no longer where it raises."""
    import transformer_engine.pytorch.graph as graph

    @functools.wraps(make_graphed_callables)
    def make(*args: Any, **kwargs: Any) -> Any:
        nested = graph.is_graph_capturing()
        try:
            return make_graphed_callables(*args, **kwargs)
        except BaseException:
            if not nested:
                graph.set_capture_end()
            raise

    return make

# SPDX-License-Identifier: Apache-2.0
"""When the shape must not change: a filled buffer, an overlap that is being enqueued, a graph capture."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.graph as graph
import transformer_engine_torch as tex
from cpu_te import CAPACITY, HIDDEN, TP, comm, rows, te_world, weight
from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm

from ub_dynamic.backends.te.captures import Captures
from ub_dynamic.backends.te.patches import Patches
from ub_dynamic.errors import UBStateError

AG = tex.CommOverlapType.AG


def test_not_between_filling_a_buffer_and_its_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        comm("qkv_fprop").copy_into_buffer(rows(CAPACITY // TP), local_chunk=True)
        gathered = comm("qkv_fprop").get_buffer(shape=[CAPACITY, HIDDEN])
        with pytest.raises(UBStateError, match="buffer of qkv_fprop is filled and its GEMM was not called"):
            world.manager.set_active_shape([64, HIDDEN])
        assert world.manager.active == (CAPACITY, HIDDEN)
        world.manager.set_active_shape([CAPACITY, HIDDEN])  # the same shape is no change
        general_gemm(weight(), gathered, ub=comm("qkv_fprop"), ub_type=AG)
        world.manager.set_active_shape([64, HIDDEN])


def test_a_buffer_that_nobody_waits_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        gathered = comm("fc1_fprop").get_buffer(shape=[CAPACITY, HIDDEN])
        assert world.backend.busy() is not None
        del gathered  # as when an exception ends the layer
        assert world.backend.busy() is None


def test_an_exception_ends_the_wait_for_a_gemm_and_the_scope_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def fail() -> None:
        kept.append(comm("qkv_fprop").get_buffer(shape=[64, HIDDEN]))  # as the frames of a kept exception do
        raise MemoryError

    with te_world(monkeypatch) as world:
        for scope in (world.manager.microbatch(64), world.manager.active_shape([64, HIDDEN])):
            with pytest.raises(MemoryError), scope:
                fail()
            assert world.manager.active == (CAPACITY, HIDDEN)
        world.manager.set_active_shape([32, HIDDEN])


def test_not_while_another_thread_enqueues(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> list[Any]:
        entered.set()
        assert leave.wait(30)
        return [None] * 4

    with te_world(monkeypatch) as world:
        world.backend.connect(None)
        monkeypatch.setattr(tex, "generic_gemm", slow)
        world.backend.connect(world.manager._on_operand)
        call = threading.Thread(target=lambda: general_gemm(weight(), rows(CAPACITY), ub=comm("qkv_fprop"), ub_type=AG))
        call.start()
        try:
            assert entered.wait(30)
            with pytest.raises(UBStateError, match=rf"thread {call.ident} is enqueuing the overlap of qkv_fprop"):
                world.manager.set_active_shape([64, HIDDEN])
        finally:
            leave.set()
            call.join(30)
        world.manager.set_active_shape([64, HIDDEN])


def test_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda self, *a, **k: begun.append("begin"))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", lambda self: begun.append("end"))
    with te_world(monkeypatch) as world:
        capture = torch.cuda.CUDAGraph.__new__(torch.cuda.CUDAGraph)
        capture.capture_begin(pool=None)
        with pytest.raises(UBStateError, match="a CUDA graph is being captured.*one graph per shape"):
            world.manager.set_active_shape([64, HIDDEN])
        world.manager.set_active_shape([CAPACITY, HIDDEN])
        capture.capture_end()
        world.manager.set_active_shape([64, HIDDEN])
    assert begun == ["begin", "end"]


def test_te_warm_up_counts_as_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        monkeypatch.setattr(graph, "_IS_GRAPH_CAPTURING", True)
        with pytest.raises(UBStateError, match="being captured"):
            world.manager.set_active_shape([64, HIDDEN])


@pytest.mark.parametrize("owner", [te, graph], ids=["te", "te.graph"])
def test_a_capture_that_fails_is_over(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        graph.set_capture_start()  # TE's own sets this, and takes it back where nothing raises
        raise MemoryError

    monkeypatch.setattr(owner, "make_graphed_callables", fail)
    with te_world(monkeypatch) as world:
        for _ in range(2):
            with pytest.raises(MemoryError), world.manager.microbatch(64):
                owner.make_graphed_callables()
            assert not graph.is_graph_capturing()
            assert world.manager.active == (CAPACITY, HIDDEN)
        monkeypatch.setattr(graph, "_IS_GRAPH_CAPTURING", True)
        with pytest.raises(MemoryError):
            owner.make_graphed_callables()
        assert graph.is_graph_capturing()  # the capture around it is not over


def test_a_capture_that_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("capture failed")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", fail)
    patches, captures = Patches(), Captures()
    captures.watch(patches)
    with pytest.raises(RuntimeError, match="capture failed"):
        torch.cuda.CUDAGraph.capture_begin(object())
    assert not captures.active()
    patches.undo()


def test_without_the_guard_cuda_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch, guard=False) as world:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UBStateError, match="being captured"):
            world.manager.set_active_shape([64, HIDDEN])

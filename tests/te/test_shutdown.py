# SPDX-License-Identifier: Apache-2.0
"""Destroying: synchronised, idempotent, and survivors are found, named and kept from doing harm."""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from typing import Any

import fakes
import pytest
import torch
import transformer_engine.pytorch.module.base as base

from ub_dynamic.backends.te import native, shutdown
from ub_dynamic.backends.te.backend import TEBackend
from ub_dynamic.backends.te.communicators import read_communicators
from ub_dynamic.backends.te.initialize import _register
from ub_dynamic.errors import UBTimeoutError
from ub_dynamic.groups import SoloGroup

CAPACITY = (256, 64)


def release(comm: Any) -> None:
    """Drop the reference that the test helper leaks, so that the object's real destructor can run."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(comm))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """TE is initialised with two communicators, which nobody else holds."""
    made = {
        ("qkv_fprop", fakes.MODES.NONE): fakes.communicator(True, CAPACITY),
        ("qkv_dgrad", fakes.MODES.NONE): fakes.communicator(False, CAPACITY),
    }
    monkeypatch.setattr(base, "_ub_communicators", made)
    monkeypatch.setattr(base, "_ub_initialized", True, raising=False)
    return made


def make(table: dict[Any, Any], group: Any = None) -> TEBackend:
    module, group = native.load(), group or SoloGroup()
    communicators = read_communicators(table, CAPACITY, 2, module, "")
    registry, _ = _register(module, communicators, group)
    bootstrap = shutdown.Bootstrap()
    return TEBackend(communicators, CAPACITY, group, native=module, registry=registry, bootstrap=bootstrap)


def test_destroy_twice(table: dict[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    backend = make(table)
    references = [comm.reference for comm in backend.communicators]
    for comm in table.values():
        release(comm)
    del comm
    table.clear()  # as if the fixture held nothing: TE's table is this very dict
    backend.destroy()
    assert [reference() for reference in references] == [None, None]
    assert base._ub_communicators is None
    assert not getattr(base, "is_ub_initialized", bool)()  # since 2.17
    assert not caplog.records
    backend.destroy()


def test_a_survivor_is_named_with_its_holder(table: dict[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    backend = make(table)
    kept_by_a_loop = table["qkv_fprop", fakes.MODES.NONE]
    release(table["qkv_dgrad", fakes.MODES.NONE])
    table.clear()
    with caplog.at_level(logging.WARNING, "ub_dynamic"):
        backend.destroy()
    (record,) = caplog.records
    text = record.getMessage()
    assert "qkv_fprop" in text
    assert "qkv_dgrad" not in text
    assert "kept_by_a_loop" in text
    assert "test_shutdown.py" in text
    assert "a dict" not in text  # TE's table is gone, and what looks for holders is none
    assert "a cell" not in text
    release(kept_by_a_loop)
    assert native.load().inspect(kept_by_a_loop)["shape"] == (0, 0)
    reference = weakref.ref(kept_by_a_loop)
    del kept_by_a_loop
    gc.collect()
    assert reference() is not None  # it can never be destroyed any more


def test_what_a_user_added_is_named_too(table: dict[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    backend = make(table)
    for comm in table.values():
        release(comm)
    del comm
    added = fakes.communicator(True, CAPACITY)
    table["extra_fprop", fakes.MODES.NONE] = added
    with caplog.at_level(logging.WARNING, "ub_dynamic"):
        backend.destroy()
    table.clear()
    (record,) = caplog.records
    assert "extra_fprop by" in record.getMessage()
    release(added)
    assert native.load().inspect(added)["shape"] == (0, 0)


class _Noting(torch.autograd.Function):
    """A backward that leaves its communicator on its node, as TE's do."""

    @staticmethod
    def forward(ctx: Any, comms: list[Any], operand: torch.Tensor) -> torch.Tensor:
        ctx.comms = comms
        return operand * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.ub_obj_gradout = ctx.comms.pop()
        return None, gradient * 2


def test_a_loss_that_is_still_there_is_no_survivor(table: dict[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    backend = make(table)
    references = [comm.reference for comm in backend.communicators]
    for comm in table.values():
        release(comm)
    del comm
    loss = _Noting.apply(list(table.values()), torch.ones(2, requires_grad=True)).sum()
    table.clear()
    loss.backward()
    node = loss.grad_fn.next_functions[0][0]
    assert node.ub_obj_gradout is not None
    node.comms.clear()
    backend.destroy()
    assert node.ub_obj_gradout is None
    assert [reference() for reference in references] == [None, None]
    assert not caplog.records


class _Keeper:
    def __init__(self, comm: Any) -> None:
        self.comm = comm
        vars(self)  # a dict of its own, as every object has before Python 3.11


def test_a_survivor_in_an_attribute(table: dict[Any, Any]) -> None:
    keeper = _Keeper(table["qkv_fprop", fakes.MODES.NONE])
    found = shutdown.holders({"qkv_fprop": weakref.ref(keeper.comm)})["qkv_fprop"]
    assert "a _Keeper in variable keeper of test_a_survivor_in_an_attribute" in found
    shutdown.release_from_nodes({"qkv_fprop": weakref.ref(keeper.comm)})
    assert keeper.comm is not None  # nobody's autograd node


def test_a_survivor_in_a_container(table: dict[Any, Any]) -> None:
    holder = [table["qkv_fprop", fakes.MODES.NONE]]
    found = shutdown.holders({"qkv_fprop": weakref.ref(holder[0])})["qkv_fprop"]
    assert "a list in variable holder of test_a_survivor_in_a_container" in found
    assert "a dict" in found  # TE's table


def test_a_survivor_without_the_native_file(table: dict[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    comm = table["qkv_fprop", fakes.MODES.NONE]
    release(table["qkv_dgrad", fakes.MODES.NONE])
    del table["qkv_dgrad", fakes.MODES.NONE]
    reference = weakref.ref(comm)
    assert shutdown.destroy_objects({"qkv_fprop": reference}, None) == ["qkv_fprop"]
    release(comm)
    del comm
    table.clear()
    gc.collect()
    assert reference() is not None


def test_cycles_are_no_survivors(table: dict[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    backend = make(table)
    for comm in table.values():
        release(comm)
        comm.itself = [comm]
    del comm
    table.clear()
    backend.destroy()
    assert not caplog.records


class _Lonely(SoloGroup):
    """A group whose other rank never comes."""

    def barrier(self, what: str) -> None:
        raise UBTimeoutError(f"waited for rank 1 in {what}")


def test_destroyed_even_if_a_rank_is_missing(table: dict[Any, Any]) -> None:
    backend = make(table, _Lonely())
    for comm in table.values():
        release(comm)
    del comm
    table.clear()
    with pytest.raises(UBTimeoutError, match="destroying the communicators"):
        backend.destroy()
    assert base._ub_communicators is None
    backend.destroy()

# SPDX-License-Identifier: Apache-2.0
"""The native file on communicator objects of the real library: what it reads, what it rewrites, what it refuses."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import fakes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ub_dynamic.backends.te import native
from ub_dynamic.backends.te.communicators import Communicator, read_communicators
from ub_dynamic.errors import UBUnsupportedError
from ub_dynamic.rules import token_rule
from ub_dynamic.shapes import CommSpec

CAPACITY = (4096, 256)


@pytest.fixture(scope="module")
def module() -> Any:
    return native.load()


def read(table: dict[Any, Any], tp: int) -> tuple[Communicator, ...]:
    return read_communicators(table, CAPACITY, tp, native.load(), "")


def matches(module: Any, communicator: Any, spec: CommSpec, tokens: int) -> None:
    """The object's shape is the layout's, in every number that a kernel reads."""
    layout = spec.layout(tokens)
    facts = module.inspect(communicator)
    assert facts["shape"] == layout.view_shape
    assert facts["data_ptr"] == communicator.memory.data_ptr()
    assert facts["itemsize"] == spec.dtype.itemsize
    if facts["is_p2p"]:
        base = facts["data_ptr"]
        chunks = tuple((base + c.offset_bytes, c.rows, c.columns) for c in layout.chunks)
        assert facts["chunks"] == chunks


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("modes", [("none",), ("fp8",), ("none", "fp8")])
@pytest.mark.parametrize("methods", [{}, {"fc2_fprop": "ring_exchange", "qkv_dgrad": "ring_exchange"}])
def test_shape_follows_the_layout(module: Any, tp: int, modes: Any, methods: dict[str, str]) -> None:
    table = fakes.table(CAPACITY, tp, modes=modes, rank=1, **methods)
    communicators = read(table, tp)
    registry = module.Registry()
    dynamic = [comm for comm in communicators if comm.spec is not None]
    for comm in dynamic:
        registry.add(comm.reference(), CAPACITY[0])
    for tokens in (CAPACITY[0], 8 * tp, 2048, 64 * tp, CAPACITY[0]):
        registry.apply(tokens)
        for index, comm in enumerate(dynamic):
            assert comm.spec is not None
            matches(module, comm.reference(), comm.spec, tokens)
            assert registry.active(index) == tokens


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_shapes(data: Any) -> None:
    module = native.load()
    tp = data.draw(st.sampled_from([2, 4, 8]))
    ring = data.draw(st.booleans())
    scatter = data.draw(st.booleans())
    hidden = data.draw(st.sampled_from([8, 32, 264, 1032]))
    capacity = (data.draw(st.integers(8, 64)) * 32 * tp, hidden)
    comm = fakes.communicator(ring, capacity, tp, rank=tp - 1, reduce_scatter=scatter)
    method = "ring_exchange" if ring else "bulk"
    spec = CommSpec("x", method, "rs" if scatter else "ag", capacity, tp, torch.bfloat16)
    registry = module.Registry()
    registry.add(comm, capacity[0])
    for _ in range(5):
        tokens = data.draw(st.integers(1, capacity[0] // tp)) * tp
        registry.apply(tokens)
        matches(module, comm, spec, tokens)


def test_a_refused_shape_changes_nothing(module: Any) -> None:
    small = fakes.communicator(True, (64, 32), 4)
    large = fakes.communicator(False, (128, 32), 4)
    registry = module.Registry()
    registry.add(large, 128)
    registry.add(small, 64)
    for tokens in (128, 6):  # the second communicator cannot take either
        with pytest.raises(ValueError, match=f"T = {tokens} is not a multiple of tp = 4 between 1 and 64|128"):
            registry.apply(tokens)
        assert (registry.active(0), registry.active(1)) == (128, 64)
    with pytest.raises(ValueError, match="T = 0"):
        registry.apply_one(0, 0)
    with pytest.raises((TypeError, ValueError)):
        registry.apply(-4)


def test_one_communicator_alone(module: Any) -> None:
    first, second = (fakes.communicator(False, (64, 32), 2) for _ in range(2))
    registry = module.Registry()
    assert [registry.add(first, 64), registry.add(second, 64)] == [0, 1]
    registry.apply_one(1, 32)
    assert (registry.active(0), registry.active(1)) == (64, 32)


@pytest.mark.parametrize("ring", [False, True])
def test_nothing_stands_behind_the_dimensions_of_a_shape(module: Any, ring: bool) -> None:
    comm = fakes.communicator(ring, (64, 32), 2)
    registry = module.Registry()
    registry.add(comm, 64)
    registry.apply(32)
    assert fakes.helper().behind_shapes(comm) == []


def test_a_dead_communicator_is_never_touched(module: Any) -> None:
    alive = fakes.communicator(False, (64, 32), 2)
    doomed = fakes.communicator(False, (64, 32), 2)
    registry = module.Registry()
    registry.add(alive, 64)
    registry.add(doomed, 64)
    memory, reference = doomed.memory, weakref.ref(doomed)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(doomed))  # the reference that fakes.communicator leaks
    del doomed
    gc.collect()
    assert reference() is None
    with pytest.raises(RuntimeError, match="destroyed"):
        registry.apply(32)
    assert registry.active(0) == 64
    with pytest.raises(RuntimeError, match="destroyed"):
        registry.active(1)
    del memory


def test_the_registry_holds_nothing(module: Any) -> None:
    comm = fakes.communicator(True, (64, 32), 2)
    before = ctypes.c_ssize_t.from_address(id(comm)).value
    registry = module.Registry()
    registry.add(comm, 64)
    registry.apply(32)
    module.inspect(comm)
    assert ctypes.c_ssize_t.from_address(id(comm)).value == before
    registry.clear()
    assert len(registry) == 0


@pytest.mark.parametrize("capacity", [32, 128])
def test_another_capacity_than_registered_is_refused(module: Any, capacity: int) -> None:
    comm = fakes.communicator(True, (64, 32), 2)
    with pytest.raises(RuntimeError, match="shape that it was registered with"):
        module.Registry().add(comm, capacity)


@pytest.mark.parametrize("value", [None, 3, "qkv_fprop", object()])
def test_other_objects_are_refused(module: Any, value: Any) -> None:
    for function in (module.inspect, module.settings):
        with pytest.raises(TypeError, match="not a communicator"):
            function(value)


def test_settings(module: Any) -> None:
    comm = fakes.communicator(False, (64, 32), 2, num_splits=4, num_sm=16)
    assert module.settings(comm) == (4, 16, 116)
    module.set_settings(comm, num_splits=2, num_sm=4, math_sms=128)
    assert module.settings(comm) == (2, 4, 128)
    assert module.inspect(comm)["num_splits"] == 2
    with pytest.raises(ValueError, match="at least 1"):
        module.set_settings(comm, 0, 4, 128)
    assert module.settings(comm) == (2, 4, 128)


@pytest.mark.parametrize("ring", [False, True])
def test_a_buried_communicator_stays_alive_and_refuses_data(module: Any, ring: bool) -> None:
    comm = fakes.communicator(ring, (64, 32), 2)
    count = ctypes.c_ssize_t.from_address(id(comm)).value
    module.bury(comm)
    assert ctypes.c_ssize_t.from_address(id(comm)).value == count + 1
    facts = module.inspect(comm)
    assert facts["shape"] == (0, 0)
    assert facts["data_ptr"] == 0
    assert all(chunk == (0, 0, 0) for chunk in facts["chunks"])
    with pytest.raises(RuntimeError, match="Invalid shape"):
        comm.copy_into_buffer(torch.zeros(32, 32, dtype=torch.bfloat16), local_chunk=True)


def test_no_shared_communicator_without_a_gpu(module: Any) -> None:
    assert not module.shared_exists()
    module.destroy_shared()  # nothing to destroy


def self_test(module: Any, comm: Any, spec: CommSpec) -> None:
    registry = module.Registry()
    native.self_test(module, registry, registry.add(comm, spec.capacity[0]), comm, spec)


def test_self_test_passes_and_restores(module: Any) -> None:
    for comm in read(fakes.table(CAPACITY, 4, modes=("none", "fp8"), rank=3), 4):
        if comm.spec is not None:
            self_test(module, comm.reference(), comm.spec)
            matches(module, comm.reference(), comm.spec, CAPACITY[0])


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"dtype": "float32"}, "dtype is torch.float32, expected torch.bfloat16"),
        ({"data_ptr": 64}, "address of get_buffer"),
        ({"shape": (64, 16)}, "shape is"),
        ({"tp_size": 4}, "tp is"),
        ({"chunks": ()}, "chunks is"),
    ],
)
def test_self_test_finds_what_differs(module: Any, damage: dict[str, Any], text: str) -> None:
    comm = fakes.communicator(True, (64, 32), 2)
    spec = CommSpec("qkv_fprop", "ring_exchange", "ag", (64, 32), 2, torch.bfloat16)

    class Wrong:
        Registry = module.Registry

        @staticmethod
        def inspect(communicator: Any) -> dict[str, Any]:
            return {**module.inspect(communicator), **damage}

    with pytest.raises(UBUnsupportedError, match=text) as caught:
        self_test(Wrong, comm, spec)
    for version in ("Transformer Engine 2.", f"torch {torch.__version__}", "qkv_fprop", "fixed capacity"):
        assert version in str(caught.value)
    matches(module, comm, spec, 64)


def test_self_test_finds_a_rewrite_without_effect(module: Any) -> None:
    comm = fakes.communicator(False, (64, 32), 2)
    spec = CommSpec("qkv_dgrad", "bulk", "ag", (64, 32), 2, torch.bfloat16)

    class Deaf:
        def apply_one(self, index: int, tokens: int) -> None:
            pass

    with pytest.raises(UBUnsupportedError):
        native.self_test(module, Deaf(), 0, comm, spec)
    assert token_rule(spec).minimum < 64

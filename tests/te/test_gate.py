# SPDX-License-Identifier: Apache-2.0
"""The native fast path of the guard: what it passes on by itself, and that it never passes what Python would refuse."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import fakes
import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from cpu_te import CAPACITY, HIDDEN, TP, World, te_world
from test_guard import AG, RS, comm, rows, weight

from ub_dynamic.backends.te import native
from ub_dynamic.backends.te.guard import Guard
from ub_dynamic.errors import UBShapeError

WRAPPERS = ("_check_gemm", "_match_output", "_operand")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with te_world(monkeypatch) as made:
        yield made


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Python had to look, by what it looked with."""
    counted: Counter[str] = Counter()
    for name in WRAPPERS:
        original = getattr(Guard, name)

        def counting(*args: Any, _name: str = name, _original: Any = original) -> Any:
            counted[_name] += 1
            return _original(*args)

        monkeypatch.setattr(Guard, name, counting)
    return counted


def test_a_layer_at_the_active_shape_never_reaches_python(world: World, looks: Counter[str]) -> None:
    layer = te.LayerNormMLP(
        HIDDEN, HIDDEN, set_parallel_mode=True, sequence_parallel=True, tp_group=None, tp_size=TP, bias=False,
        activation="relu", params_dtype=torch.bfloat16, device="cpu", ub_overlap_ag=True, ub_overlap_rs=True,
        ub_bulk_dgrad=True, ub_bulk_wgrad=True,
    )  # fmt: skip
    for tokens in (128, CAPACITY, 64):
        world.manager.set_active_shape([tokens, HIDDEN])
        looks.clear()
        layer(rows(tokens // TP).requires_grad_()).sum().backward()
        assert not looks
    assert world.overlaps()
    assert {call.tokens for call in world.overlaps()} == {128, CAPACITY, 64}
    assert sum(world.backend.guard.runs.values()) == len(world.overlaps())


def test_gemms_of_others_pass_without_a_look(world: World, looks: Counter[str]) -> None:
    tex.generic_gemm(weight(), True, rows(12), False, None)
    tex.generic_gemm(weight(), True, rows(12), False, None, comm_overlap=None, comm_type=None)
    assert not looks
    assert len(world.calls) == 2


def test_after_remove_everything_passes(world: World, looks: Counter[str]) -> None:
    ours = tex.generic_gemm
    world.backend.connect(None)
    assert tex.generic_gemm is not ours
    ours(weight(), True, rows(12), False, None, comm_overlap=comm("fc1_fprop"), comm_type=AG)  # somebody kept it
    ours(weight(), True, rows(CAPACITY), False, None, comm_overlap=comm("fc1_fprop"), comm_type=AG)
    assert not looks
    assert not world.backend.guard.runs


def test_what_was_counted_stays_counted_once(world: World) -> None:
    for times in (1, 2):
        tex.generic_gemm(weight(), True, rows(CAPACITY), False, None, comm_overlap=comm("fc1_fprop"), comm_type=AG)
        for connected in (True, False, False, True):
            world.backend.connect(world.manager._on_operand if connected else None)
            assert world.backend.guard.runs == {("fc1_fprop", "all-gather + GEMM"): times}


def test_an_error_of_te_leaves_nothing_under_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        assert "enqueuing the overlap of fc1_fprop" not in str(world.backend.busy())  # this thread's own
        assert list(world.backend.guard._enqueuing.values()) == ["fc1_fprop"]
        raise MemoryError("no room")

    world.backend.connect(None)
    monkeypatch.setattr(tex, "generic_gemm", fails)
    world.backend.connect(world.manager._on_operand)
    with pytest.raises(MemoryError, match="no room"):
        tex.generic_gemm(weight(), True, rows(CAPACITY), False, None, comm_overlap=comm("fc1_fprop"), comm_type=AG)
    assert not world.backend.guard._enqueuing
    assert not world.backend.guard.runs
    world.backend.connect(None)


def test_a_buffer_that_is_handed_out_keeps_the_shape_until_its_gemm(world: World) -> None:
    buffer = comm("fc1_fprop").get_buffer(False, [CAPACITY, HIDDEN])
    assert "fc1_fprop is filled" in str(world.backend.busy())
    tex.generic_gemm(weight(), True, buffer, False, None, comm_overlap=comm("fc1_fprop"), comm_type=AG)
    assert world.backend.busy() is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_where_no_call_may_pass_python_looks_at_all(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Quantised buffers take the long way; float32 ones stay at capacity, which the guard has to see too."""
    real = fakes.communicator
    monkeypatch.setattr(fakes, "communicator", lambda *args, **options: real(*args, **{**options, "dtype": dtype}))
    with te_world(monkeypatch) as made:
        for name, kind in (("fc2_fprop", RS), ("fc1_fprop", AG)):
            operand = torch.zeros(2 * CAPACITY, HIDDEN, dtype=dtype)
            with pytest.raises(UBShapeError, match=f"{name}: the microbatch has {2 * CAPACITY} tokens"):
                tex.generic_gemm(weight(), True, operand, False, None, comm_overlap=comm(name), comm_type=kind)
        assert not made.calls


def test_a_wrapper_keeps_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = native.load()
    gate = module.Gate(module.Registry(), {}, {}, AG, RS)
    gate.add(object(), "x", 0, 8, 2, splits=True, copies=True, lends=False, kinds=["a", "b", "c", "d"])
    wrapped = gate.generic_gemm(lambda *args, **kwargs: "te", lambda *args, **kwargs: "python")
    del gate
    gc.collect()
    assert wrapped(weight(), True, rows(8), False, comm_overlap=comm, comm_type=AG) == "python"
    assert (wrapped.__name__, bool(wrapped.__doc__)) == ("generic_gemm", True)


def _outcome(call: Callable[[], Any], world: World) -> tuple[Any, ...]:
    """What a call came to: error or not, the overlaps it counted, and what is under way after it."""
    before = Counter(world.backend.guard.runs)
    world.calls.clear()
    try:
        call()
        error = ""
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    guard = world.backend.guard
    made = (error, dict(guard.runs - before), len(world.calls), sorted(guard._lent), dict(guard._enqueuing))
    guard._lent.clear()
    return made


def _random_call(choose: random.Random) -> Callable[[], Any]:
    names = ["fc1_fprop", "fc2_fprop", "fc1_dgrad", "qkv_wgrad", "fc2_dgrad", "qkv_dgrad"]
    name = choose.choice(names)
    tokens = choose.choice([16, 32, 48, 64, CAPACITY])
    width = choose.choice([HIDDEN, HIDDEN, HIDDEN, 32])
    kind = choose.randrange(3)
    if kind == 0:
        operand = rows(tokens, HIDDEN).view(choose.choice([(tokens, HIDDEN), (tokens // 4, 4, HIDDEN)]))
        transposed = choose.choice([True, False])
        extra = choose.choice([None, rows(tokens // TP, width), rows(tokens, width)])
        options = {"comm_overlap": comm(name), "comm_type": choose.choice([AG, RS]), "extra_output": extra}
        if choose.random() < 0.5:
            options["bulk_overlap"] = choose.choice([True, False])
        matrix = weight(width) if transposed else weight(HIDDEN, width)
        return lambda: tex.generic_gemm(matrix, transposed, operand, False, None, **options)
    local = choose.choice([True, False])
    if kind == 1:
        return lambda: comm(name).copy_into_buffer(rows(tokens // TP if local else tokens, width), local_chunk=local)
    shape = choose.choice([None, [tokens // TP if local else tokens, width], (tokens, width)])
    return lambda: comm(name).get_buffer(local, shape)


@pytest.mark.parametrize("methods", [{}, {"fc2_fprop": "ring_exchange", "fc1_dgrad": "ring_exchange"}])
def test_it_comes_to_what_python_comes_to(monkeypatch: pytest.MonkeyPatch, methods: dict[str, str]) -> None:
    with te_world(monkeypatch, **methods) as world:
        world.backend.connect(None)
        # Real buffers would refuse some of these themselves; what is compared is the guard.
        for kind in (fakes.Base, fakes.Ring):
            monkeypatch.setattr(kind, "copy_into_buffer", lambda self, input, local_chunk=False: None)
            monkeypatch.setattr(kind, "get_buffer", lambda self, local_chunk=False, shape=None: torch.empty(1))
        guard, passed = world.backend.guard, 0
        for number in range(400):
            active = random.Random(-number).choice([16, 32, 64, CAPACITY])
            found = []
            for gate in (guard._make_gate, None):
                world.backend.connect(None)
                guard._make_gate, kept = gate, guard._make_gate
                world.backend.connect(world.manager._on_operand)
                guard._make_gate = kept
                world.manager.set_active_shape([active, HIDDEN])
                found.append(_outcome(_random_call(random.Random(number)), world))
            assert found[0] == found[1], number
            passed += not found[0][0]
        world.backend.connect(None)
        assert 40 < passed < 360

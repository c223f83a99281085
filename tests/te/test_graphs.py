# SPDX-License-Identifier: Apache-2.0
"""GraphedMicrobatches: which capture serves which microbatch. TE's capture itself is replaced; it needs a
GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ub_dynamic import UBAlignmentError, UBCapacityError, UBShapeError, UBStateError, UBUnsupportedError
from ub_dynamic.backends.te.graphs import GraphedMicrobatches
from ub_dynamic.packing import PackedBatch

te = pytest.importorskip("transformer_engine.pytorch")
graph = pytest.importorskip("transformer_engine.pytorch.graph")
pytestmark = pytest.mark.te

CAPACITY = 64


class Manager:
    """Records the active shape; T in multiples of 2."""

    def __init__(self) -> None:
        self.active = CAPACITY
        self.compared: list[int] = []
        self.destroyed = False
        self.policy: Any = None

    @contextlib.contextmanager
    def microbatch(self, batch: Any) -> Iterator[None]:
        before, self.active = self.active, getattr(batch, "local_tokens", batch)
        self.compared.append(self.active)
        try:
            yield
        finally:
            self.active = before

    def max_tokens(self) -> int:
        return CAPACITY

    def round_up_tokens(self, tokens: int) -> int:
        if tokens > CAPACITY:
            raise UBCapacityError(f"T = {tokens} exceeds {CAPACITY}")
        return tokens + tokens % 2


class Capture:
    """Stands for what TE captures; ``freed`` after a reset."""

    def __init__(self, module: torch.nn.Module, manager: Manager, arguments: Any) -> None:
        self.module, self.tokens, self.arguments, self.freed = module, manager.active, arguments, False

    def __call__(self, *tensors: torch.Tensor, **more: torch.Tensor) -> Any:
        assert not self.freed
        return self.module(*tensors, **more)

    def reset(self) -> None:
        self.freed = True


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Capture]:
    made: list[Capture] = []

    def capture(module: Any, sample_args: Any, *, num_warmup_iters: int, sample_kwargs: Any, **more: Any) -> Any:
        made.append(Capture(module, MANAGER[0], (sample_args, sample_kwargs)))
        return made[-1]

    monkeypatch.setattr(te, "make_graphed_callables", capture)
    return made


MANAGER: list[Manager] = []


@pytest.fixture
def manager() -> Manager:
    MANAGER[:] = [Manager()]
    return MANAGER[0]


def rows(tokens: int, grad: bool = True) -> torch.Tensor:
    return torch.ones(tokens, 4, requires_grad=grad)


def test_one_capture_a_shape_inside_its_active_shape(captures: list[Capture], manager: Manager) -> None:
    graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager)
    for tokens in (8, 16, 8, 16):
        graphed(tokens, rows(tokens)).sum().backward()
    assert [made.tokens for made in captures] == [8, 16]
    assert (graphed.captures, graphed.replays, len(graphed), manager.active) == (2, 4, 2, CAPACITY)


def test_packed_batches_share_a_graph_by_their_shape_key(captures: list[Capture], manager: Manager) -> None:
    graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager)
    for lengths in ([6, 10], [10, 6], [4, 4, 8]):
        batch = PackedBatch.from_lengths(lengths, tp=2)
        graphed(batch, rows(batch.total_tokens)).sum().backward()
    assert len(captures) == 2


def test_arguments_that_are_no_tensors_are_baked_in(captures: list[Capture], manager: Manager) -> None:
    class Scale(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, by: float, shift: torch.Tensor) -> torch.Tensor:
            return x * by + shift

    graphed = GraphedMicrobatches(Scale(), manager)
    for by in (2.0, 3.0, 2.0):
        out = graphed(8, rows(8), by=by, shift=torch.ones(1))
        assert torch.equal(out, torch.full((8, 4), by + 1))
        out.sum().backward()
    assert len(captures) == 2
    assert list(captures[0].arguments[1]) == ["shift"]
    with pytest.raises(UBUnsupportedError, match="hashable"):
        graphed(8, rows(8), by=[2.0], shift=torch.ones(1))


def test_a_second_microbatch_of_a_shape_waits_for_no_one(captures: list[Capture], manager: Manager) -> None:
    graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager, in_flight=2)
    first, second = graphed(8, rows(8)), graphed(8, rows(8))
    assert len(captures) == 2
    with pytest.raises(UBStateError, match="in_flight = 3"):
        graphed(8, rows(8))
    first.sum().backward()
    third = graphed(8, rows(8))
    second.sum().backward()
    third.sum().backward()
    assert len(captures) == 2


def test_an_output_that_is_dropped_frees_its_graph(captures: list[Capture], manager: Manager) -> None:
    graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager)
    dropped = graphed(8, rows(8))
    with pytest.raises(UBStateError):
        graphed(8, rows(8))
    del dropped
    graphed(8, rows(8)).sum().backward()
    assert len(captures) == 1


def test_the_shape_that_was_not_used_for_longest_goes_first(captures: list[Capture], manager: Manager) -> None:
    graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager, max_graphs=2)
    for tokens in (8, 16, 8, 24):
        graphed(tokens, rows(tokens)).sum().backward()
    assert [(made.tokens, made.freed) for made in captures] == [(8, False), (16, True), (24, False)]
    waiting = graphed(8, rows(8))
    graphed(32, rows(32)).sum().backward()  # 8 is in use, so 24 goes
    assert [made.tokens for made in captures if made.freed] == [16, 24]
    with pytest.raises(UBStateError, match="between its forward and its backward"):
        graphed.clear()
    waiting.sum().backward()
    graphed.clear()
    assert all(made.freed for made in captures)
    assert len(graphed) == 0


def test_without_gradients_or_in_evaluation_nothing_is_captured(captures: list[Capture], manager: Manager) -> None:
    module = torch.nn.Linear(4, 4)
    graphed = GraphedMicrobatches(module, manager)
    with torch.no_grad():
        graphed(8, rows(8, False))
    module.eval()
    graphed(8, rows(8))
    assert captures == []


def test_a_capture_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, manager: Manager) -> None:
    def fail(*_: Any, **__: Any) -> None:
        graph.set_capture_start()
        raise RuntimeError("no memory")

    monkeypatch.setattr(te, "make_graphed_callables", fail)
    graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager)
    with pytest.raises(RuntimeError, match="no memory"):
        graphed(8, rows(8))
    assert len(graphed) == 0
    assert not graph.is_graph_capturing()  # without a guard too


def test_parameters_that_are_frozen_or_not_have_graphs_of_their_own(captures: list[Capture], manager: Manager) -> None:
    module = torch.nn.Linear(4, 4)
    graphed = GraphedMicrobatches(module, manager)
    module.bias.requires_grad_(False)
    for frozen in (True, False, True):
        module.bias.requires_grad_(not frozen)
        graphed(8, rows(8)).sum().backward()
    assert len(captures) == graphed.captures == 2
    assert all(parameter._backward_hooks for parameter in module.parameters())


def test_ranks_compare_the_t_of_a_replay(captures: list[Capture], manager: Manager) -> None:
    graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager)
    for tokens in (8, 16, 8):
        manager.compared.clear()
        graphed(tokens, rows(tokens)).sum().backward()
        assert manager.compared == [tokens]
    assert len(captures) == 2


def test_another_policy_ends_the_graphs_of_the_first(captures: list[Capture], manager: Manager) -> None:
    graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager)
    output = graphed(8, rows(8))
    manager.policy = object()
    with pytest.raises(UBStateError, match="between its forward and its backward"):
        graphed(8, rows(8))
    output.sum().backward()
    for _ in range(2):
        graphed(8, rows(8)).sum().backward()
    assert [made.freed for made in captures] == [True, False]


def test_destroyed_communicators_are_never_replayed_into(captures: list[Capture], manager: Manager) -> None:
    graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager)
    graphed(8, rows(8)).sum().backward()
    output = graphed(8, rows(8))
    manager.destroyed = True
    with pytest.raises(UBStateError, match="the communicators are destroyed; call initialize_ub first"):
        output.sum().backward()
    with pytest.raises(UBStateError, match="the communicators are destroyed"):
        graphed(16, rows(16))
    assert len(captures) == 1
    graphed.clear()  # though the loss is still there
    assert [made.freed for made in captures] == [True]


class TestBuckets:
    def test_rounding_up_ends_at_the_capacity(self, manager: Manager) -> None:
        graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager, bucket=24)
        assert [graphed.round_up(tokens) for tokens in (1, 24, 25, 49, 64)] == [24, 24, 48, 64, 64]
        with pytest.raises(UBCapacityError):
            graphed.round_up(65)

    def test_another_t_is_refused_with_the_next_one(self, captures: list[Capture], manager: Manager) -> None:
        graphed = GraphedMicrobatches(torch.nn.Linear(4, 4), manager, bucket=24)
        with pytest.raises(UBAlignmentError, match="bucket = 24; the next valid T is 48"):
            graphed(26, rows(26))
        graphed(48, rows(48)).sum().backward()
        graphed(CAPACITY, rows(CAPACITY)).sum().backward()
        assert len(captures) == 2


@pytest.mark.parametrize("name", ["bucket", "max_graphs", "in_flight"])
def test_counts_below_one_are_refused(name: str, manager: Manager) -> None:
    with pytest.raises(UBShapeError, match=name):
        GraphedMicrobatches(torch.nn.Linear(4, 4), manager, **{name: 0})


def test_gradients_are_copied_for_a_te_that_returns_its_own_buffers(
    monkeypatch: pytest.MonkeyPatch, captures: list[Capture], manager: Manager
) -> None:
    module = torch.nn.Linear(4, 4)
    graphed = GraphedMicrobatches(module, manager)
    graphed(8, rows(8)).sum().backward()  # the stand-in has no clone_param_grads_on_return
    assert all(parameter._backward_hooks for parameter in module.parameters())
    graphed.clear()
    assert not any(parameter._backward_hooks for parameter in module.parameters())

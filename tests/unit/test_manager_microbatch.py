# SPDX-License-Identifier: Apache-2.0
"""Contexts restore the shape before, and each backward sees the shape of its forward."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
import torch.utils.checkpoint
from managers import Seen, make

from ub_dynamic.errors import (
    UBAlignmentError,
    UBShapeError,
    UBStateError,
)


@dataclass(frozen=True)
class Batch:
    total_tokens: int


@dataclass(frozen=True)
class SplitBatch:
    total_tokens: int
    local_tokens: int


class TestContexts:
    def test_the_shape_before_comes_back(self) -> None:
        manager, backend = make()
        manager.set_active_shape([64, 64])
        with manager.active_shape([32, 64]) as report:
            assert manager.active == report.shape == (32, 64)
            with manager.active_shape([128, 64]):
                assert manager.active == (128, 64)
            assert manager.active == (32, 64)
        assert backend.calls == [64, 32, 128, 32, 64]

    def test_after_exceptions_too(self) -> None:
        manager, _ = make()
        with pytest.raises(ZeroDivisionError), manager.microbatch(64):
            raise ZeroDivisionError
        assert manager.active == (128, 64)

    @pytest.mark.parametrize("batch", [64, Batch(64), SplitBatch(256, 64)])
    def test_a_microbatch_is_a_number_or_a_batch(self, batch: object) -> None:
        manager, _ = make()
        with manager.microbatch(batch) as mb:
            assert mb.shape == manager.active == (64, 64) and mb.tokens == 64

    def test_a_bad_microbatch(self) -> None:
        manager, backend = make()
        with pytest.raises(UBAlignmentError, match="next valid T is 68"), manager.microbatch(Batch(66)):
            pass
        assert backend.calls == []


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor


class Slotted:
    """As ``@dataclass(slots=True)`` makes it."""

    __slots__ = ("logits", "unset")
    logits: torch.Tensor
    unset: torch.Tensor

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class TestBindBackward:
    def test_each_backward_sees_its_own_shape(self) -> None:
        manager, _ = make()
        notes: list[int] = []
        outputs = []
        for tokens in (16, 32, 64):  # three forwards, then three backwards, as pipeline schedules do
            with manager.microbatch(tokens) as mb:
                x = torch.ones(2, requires_grad=True)
                outputs.append(mb.bind_backward(Seen.apply(x, manager, notes)))
        for output in outputs:
            output.sum().backward()
        assert notes == [16, 32, 64]

    def test_the_output_is_returned_itself(self) -> None:
        manager, _ = make()
        output = torch.ones(2, requires_grad=True) * 2
        assert manager.bind_backward(output, [64, 64]) is output and output._base is None

    def test_tensors_in_containers_and_without_gradients(self) -> None:
        manager, _ = make()
        notes: list[int] = []
        x = torch.ones(2, requires_grad=True)
        output = manager.bind_backward({"a": [Seen.apply(x, manager, notes)], "b": (torch.ones(1), None, 3)}, [64, 64])
        output["a"][0].sum().backward()
        assert notes == [64]

    def test_outputs_in_dataclasses_and_outputs_without_a_tensor(self) -> None:
        manager, _ = make()
        notes: list[int] = []
        output = manager.bind_backward(Output(Seen.apply(torch.ones(2, requires_grad=True), manager, notes)), [64, 64])
        output.logits.sum().backward()
        assert notes == [64]
        slotted = manager.bind_backward(
            dataclass(init=False)(Slotted)(Seen.apply(torch.ones(2, requires_grad=True), manager, notes)), [32, 64]
        )
        slotted.logits.sum().backward()
        assert notes == [64, 32]
        for nothing in (None, 3, [], iter([torch.ones(1)])):
            with pytest.raises(UBStateError, match=f"found no tensor in {type(nothing).__name__}"):
                manager.bind_backward(nothing, [64, 64])

    def test_an_output_that_contains_itself_is_refused(self) -> None:
        manager, _ = make()
        notes: list[int] = []
        logits = Seen.apply(torch.ones(2, requires_grad=True), manager, notes)
        circle: list[object] = [logits]
        circle.append({"same": circle})
        with pytest.raises(UBStateError, match="holds a list that contains itself; pass a tensor, or"):
            manager.bind_backward(circle, [64, 64])
        assert notes == []
        shared = [logits]
        manager.bind_backward((shared, shared), [64, 64])  # twice is no circle
        logits.sum().backward()
        assert notes == [64]

    def test_an_output_may_be_deeper_than_python_recurses_and_share_its_parts(self) -> None:
        manager, _ = make()
        notes: list[int] = []
        deep: object = Seen.apply(torch.ones(2, requires_grad=True), manager, notes)
        logits = deep
        for _ in range(sys.getrecursionlimit()):
            deep = [deep]
        for _ in range(64):
            deep = (deep, deep)  # looked into once each, not 2**64 times
        manager.bind_backward(deep, [64, 64])
        logits.sum().backward()  # type: ignore[attr-defined]
        assert notes == [64]

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_recomputation_sees_the_shape_of_its_forward(self, reentrant: bool) -> None:
        manager, _ = make()
        notes: list[int] = []
        forwards: list[int] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            forwards.append(manager.active[0])
            return Seen.apply(x, manager, notes)  # type: ignore[no-any-return]

        outputs = []
        for tokens in (16, 32):
            with manager.microbatch(tokens) as mb:
                x = torch.ones(2, requires_grad=True)
                outputs.append(
                    mb.bind_backward(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant) * 1)
                )
        for output in reversed(outputs):
            output.sum().backward()
        assert forwards == [16, 32, 32, 16] and notes == [32, 16]


class TestRestore:
    def test_shapes_of_single_communicators_come_back(self) -> None:
        manager, backend = make()
        manager.set_active_shape([32, 64], names=["fc1_fprop", "fc2_fprop"])
        backend.calls.clear()
        with manager.active_shape([64, 64]):
            assert manager.buffer_active_shape("fc1_fprop") == (64, 64)
        assert backend.calls == [64, 128, ("fc1_fprop", 32), ("fc2_fprop", 32)]
        assert manager.buffer_active_shape("fc1_fprop") == (32, 64) and manager.active == (128, 64)

    def test_the_first_error_wins(self) -> None:
        manager, backend = make()
        with pytest.raises(ZeroDivisionError), manager.active_shape([64, 64]):  # noqa: PT012
            backend.why_busy = "an operation failed in the middle"
            raise ZeroDivisionError
        assert manager.active == (64, 64)  # it could not be restored
        backend.why_busy = None
        block = manager.active_shape([32, 64])
        block.__enter__()
        backend.why_busy = "a filled buffer"
        with pytest.raises(UBStateError, match="a filled buffer"):  # without an error of the block, this is the one
            block.__exit__(None, None, None)


@pytest.mark.parametrize("batch", [None, 64.0, "64", [64]])
def test_what_a_microbatch_takes(batch: object) -> None:
    manager, backend = make()
    with pytest.raises(UBShapeError, match=r"microbatch takes a number of tokens T, or a PackedBatch .*, not "):
        manager.microbatch(batch).__enter__()
    assert backend.calls == []

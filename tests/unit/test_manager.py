# SPDX-License-Identifier: Apache-2.0
"""The manager over a recording backend: what is applied when, and that a wrong call changes nothing."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from fake_backend import FakeBackend

from ub_dynamic.errors import (
    UBAlignmentError,
    UBCapacityError,
    UBShapeError,
    UBStateError,
    UBUnsupportedError,
)
from ub_dynamic.manager import Manager
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice, Policy


def make(backend: FakeBackend | None = None, **options: object) -> tuple[Manager, FakeBackend]:
    backend = backend or FakeBackend()
    return Manager(backend, next(iter(backend.specs.values())).capacity, check="never", **options), backend  # type: ignore[arg-type]


class TestSet:
    def test_all_communicators_in_one_call(self) -> None:
        manager, backend = make()
        report = manager.set_active_shape([64, 64])
        assert backend.calls == [64] and manager.active == (64, 64)
        assert report.shape == (64, 64) and report.updated == tuple(backend.specs)
        assert dict(report.skipped) == backend.skipped and "proj_wgrad" in report.skipped

    def test_the_same_shape_again_returns_at_once(self) -> None:
        manager, backend = make()
        manager.set_active_shape([128, 64])
        manager.set_active_shape([64, 64])
        assert manager.set_active_shape((64, 64)) == manager.set_active_shape(torch.Size([64, 64]))
        assert backend.calls == [64] and manager.shape_changes == 1

    def test_reset_goes_back_to_capacity(self) -> None:
        manager, backend = make()
        manager.set_active_shape([4, 64])
        assert manager.reset_active_shape().shape == (128, 64)
        assert backend.calls == [4, 128]

    def test_tensors_of_the_host_are_ints(self) -> None:
        manager, backend = make()
        manager.set_active_shape([torch.tensor(64), torch.tensor(64)])
        assert backend.calls == [64] and type(manager.active[0]) is int

    @pytest.mark.parametrize("tokens", [8.5, True, "8", None, 0, -5])
    def test_a_token_count_is_a_positive_int(self, tokens: object) -> None:
        manager, _ = make()
        with pytest.raises(UBShapeError, match="a token count"):
            manager.round_up_tokens(tokens)  # type: ignore[arg-type]

    def test_limits(self) -> None:
        manager, _ = make()
        assert (manager.token_multiple(), manager.max_tokens()) == (4, 128)
        assert [manager.round_up_tokens(tokens) for tokens in (1, 4, 5, 125)] == [4, 4, 8, 128]
        with pytest.raises(UBCapacityError, match="T = 129 rounds up to 132.*128"):
            manager.round_up_tokens(129)


BAD_SHAPES = [
    ([64], UBShapeError, ["2-D [tokens, hidden]", "[64]"]),
    ([64.0, 64], UBShapeError, ["2-D [tokens, hidden]", "64.0"]),
    ([True, 64], UBShapeError, ["2-D [tokens, hidden]", "True"]),
    ("ab", UBShapeError, ["2-D [tokens, hidden]", "'ab'"]),
    ([torch.zeros((), dtype=torch.int64, device="meta"), 64], UBShapeError, ["synchronise"]),
    ([0, 64], UBShapeError, ["must be positive", "skip the microbatch on all TP ranks"]),
    ([-4, 64], UBShapeError, ["must be positive", "-4"]),
    ([64, -64], UBShapeError, ["must be positive", "-64"]),
    ([132, 64], UBCapacityError, ["132", "128", "qkv_fprop"]),
    ([64, 32], UBShapeError, ["hidden size is fixed at init", "64"]),
    ([66, 64], UBAlignmentError, ["66", "tp = 4", "next valid T is 68"]),
    ([127, 64], UBAlignmentError, ["127", "tp = 4", "next valid T is 128"]),
]


WAYS = {
    "set": lambda manager, shape: manager.set_active_shape(shape),
    "context": lambda manager, shape: manager.active_shape(shape).__enter__(),
    "bind": lambda manager, shape: manager.bind_backward(torch.ones(1, requires_grad=True) * 2, shape),
    "one communicator": lambda manager, shape: manager.set_buffer_active_shape("qkv_fprop", shape),
}


@pytest.mark.parametrize(("shape", "error", "words"), BAD_SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_bad_shapes_change_nothing(way: str, shape: object, error: type[UBShapeError], words: list[str]) -> None:
    manager, backend = make()
    manager.set_active_shape([32, 64])
    with pytest.raises(error) as raised:
        WAYS[way](manager, shape)
    assert type(raised.value) is error
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert manager.active == (32, 64) and backend.calls == [32]
    assert manager.buffer_active_shape("qkv_fprop") == (32, 64)


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


class Seen(torch.autograd.Function):
    """Notes the active shape that its backward sees."""

    @staticmethod
    def forward(ctx, x, manager, notes):  # type: ignore[no-untyped-def]
        ctx.manager, ctx.notes = manager, notes
        ctx.save_for_backward(x)  # non-reentrant checkpoints recompute when this is unpacked
        return x * 2

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.saved_tensors  # noqa: B018
        ctx.notes.append(ctx.manager.active[0])
        return grad * 2, None, None


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor


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
        for nothing in (None, 3, [], iter([torch.ones(1)])):
            with pytest.raises(UBStateError, match=f"found no tensor in {type(nothing).__name__}"):
                manager.bind_backward(nothing, [64, 64])

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


class TestGuard:
    def test_an_operand_of_other_size_is_refused(self) -> None:
        manager, backend = make()
        manager.set_active_shape([64, 64])
        assert backend.on_operand is not None
        backend.on_operand("fc2_fprop", 64)
        with pytest.raises(
            UBShapeError, match=r"fc2_fprop.*32 tokens.*active shape is 64.*set_ub_active_shape\(\[32, 64\]\)"
        ):
            backend.on_operand("fc2_fprop", 32)
        assert manager.active == (64, 64)

    def test_without_guard_nothing_is_watched(self) -> None:
        _, backend = make(guard=False)
        assert backend.on_operand is None

    def test_auto_sets_instead(self) -> None:
        manager, backend = make(auto=True)
        assert backend.on_operand is not None
        backend.on_operand("fc1_fprop", 64)
        backend.on_operand("fc2_fprop", 64)
        backend.on_operand("fc1_fprop", 32)
        assert backend.calls == [64, 32] and manager.active == (32, 64)
        with pytest.raises(UBAlignmentError, match="next valid T is 36"):
            backend.on_operand("fc1_fprop", 33)
        assert manager.active == (32, 64)


class TestOneCommunicator:
    def test_it_is_set_apart_until_the_next_common_shape(self) -> None:
        manager, backend = make()
        manager.set_buffer_active_shape("fc1_fprop", [64, 64])
        assert manager.buffer_active_shape("fc1_fprop") == (64, 64)
        assert manager.buffer_active_shape("fc2_fprop") == manager.active == (128, 64)
        assert backend.on_operand is not None
        backend.on_operand("fc1_fprop", 64)
        manager.set_active_shape([128, 64])  # not "the same again": fc1_fprop differs
        assert backend.calls == [("fc1_fprop", 64), 128]
        assert manager.buffer_active_shape("fc1_fprop") == (128, 64)

    def test_names_set_some(self) -> None:
        manager, backend = make()
        report = manager.set_active_shape([64, 64], names=["fc1_fprop", "fc2_fprop"])
        assert report.updated == ("fc1_fprop", "fc2_fprop")
        assert manager.set_active_shape([32, 64], names="fc1_fprop").updated == ("fc1_fprop",)
        backend.calls.pop()
        assert backend.calls == [("fc1_fprop", 64), ("fc2_fprop", 64)]

    def test_one_that_stays_at_capacity_says_why(self) -> None:
        manager, backend = make()
        with pytest.raises(UBUnsupportedError, match="proj_wgrad stays at capacity.*external communicators"):
            manager.set_buffer_active_shape("proj_wgrad", [64, 64])
        assert manager.buffer_active_shape("proj_wgrad") == (128, 64) and backend.calls == []

    def test_an_unknown_name(self) -> None:
        manager, _ = make()
        with pytest.raises(UBStateError, match="no communicator 'fc3_fprop'.*fc2_fprop"):
            manager.set_buffer_active_shape("fc3_fprop", [64, 64])


class TestState:
    def test_a_busy_backend_refuses_a_change_but_not_the_same_shape(self) -> None:
        manager, backend = make()
        backend.why_busy = "qkv_fprop holds an operand that no GEMM has taken yet"
        manager.set_active_shape([128, 64])
        for call in (
            lambda: manager.set_active_shape([64, 64]),
            lambda: manager.set_buffer_active_shape("fc1_fprop", [64, 64]),
        ):
            with pytest.raises(UBStateError, match="T = 64 now: qkv_fprop holds an operand"):
                call()
        assert backend.calls == [] and manager.active == (128, 64)

    def test_destroy_ends_the_watch(self) -> None:
        manager, backend = make()
        manager.destroy()
        assert backend.on_operand is None and backend.calls == ["destroy"]

    def test_a_capacity_that_does_not_fit_is_refused(self) -> None:
        with pytest.raises(UBAlignmentError, match="T = 126 is not a multiple of tp = 4"):
            make(FakeBackend(capacity=(126, 64)))

    def test_a_check_needs_a_board(self) -> None:
        with pytest.raises(UBStateError, match="rank board"):
            Manager(FakeBackend(), (128, 64), check="deferred")
        with pytest.raises(UBStateError, match="'often'.*deferred"):
            Manager(FakeBackend(), (128, 64), check="often")  # type: ignore[arg-type]

    def test_threads_do_not_tear_a_change(self) -> None:
        manager, backend = make()
        failures: list[BaseException] = []

        def change(tokens: int) -> None:
            try:
                for _ in range(300):
                    manager.set_active_shape([tokens, 64])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=change, args=(tokens,)) for tokens in (32, 64, 96)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and backend.calls[-1] == manager.active[0]


RING, NONE, PIPELINE = OverlapConfig("ring_exchange"), OverlapConfig("none"), OverlapConfig("pipeline", num_splits=2)
SMALL, LARGE = {"fc2_fprop": Choice(NONE, "small")}, {"fc2_fprop": Choice(PIPELINE, "large")}
POLICY = Policy((1, 32, 64), (SMALL, {}, LARGE))


class TestPolicy:
    def test_the_stage_of_capacity_stands_from_the_start(self) -> None:
        _, backend = make(policy=POLICY)
        assert backend.calls == [{"fc2_fprop": PIPELINE}]

    def test_a_stage_is_switched_before_its_shape_is_applied_and_only_where_it_differs(self) -> None:
        manager, backend = make(policy=POLICY)
        backend.calls.clear()
        for tokens in (100, 64, 60, 60, 8, 4, 128):
            assert manager.set_active_shape([tokens, 64]).overlap == POLICY.choices(tokens)
        assert backend.calls == [100, 64, {}, 60, {"fc2_fprop": NONE}, 8, 4, {"fc2_fprop": PIPELINE}, 128]

    def test_stages_with_the_same_choices_are_one_plan_but_say_their_own_reason(self) -> None:
        again = {"fc2_fprop": Choice(PIPELINE, "larger")}
        manager, backend = make(policy=Policy((1, 64), (LARGE, again)))
        assert manager.set_active_shape([32, 64]).overlap == LARGE
        assert manager.set_active_shape([128, 64]).overlap == again
        assert backend.calls == [{"fc2_fprop": PIPELINE}, 32, 128]

    def test_without_a_policy_nothing_is_switched(self) -> None:
        manager, backend = make()
        assert manager.set_active_shape([64, 64]).overlap == {} and backend.calls == [64]

    def test_contexts_restore_the_choice_with_the_shape(self) -> None:
        manager, backend = make(policy=POLICY)
        backend.calls.clear()
        with pytest.raises(ZeroDivisionError), manager.microbatch(8):  # noqa: PT012
            assert manager.set_active_shape([8, 64]).overlap == SMALL
            raise ZeroDivisionError
        assert backend.calls == [{"fc2_fprop": NONE}, 8, {"fc2_fprop": PIPELINE}, 128]
        assert manager.set_active_shape([128, 64]).overlap == LARGE

    def test_each_backward_sees_the_choice_of_its_shape(self) -> None:
        manager, backend = make(policy=POLICY)
        notes: list[int] = []
        with manager.microbatch(8) as mb:
            output = mb.bind_backward(Seen.apply(torch.ones(2, requires_grad=True), manager, notes))
        backend.calls.clear()
        output.sum().backward()
        assert notes == [8] and backend.calls == [{"fc2_fprop": NONE}, 8]

    def test_a_refused_shape_leaves_the_choice(self) -> None:
        manager, backend = make(policy=POLICY)
        backend.calls.clear()
        for shape, why in (([6, 64], None), ([8, 64], "a filled buffer")):
            backend.why_busy = why
            with pytest.raises((UBShapeError, UBStateError)):
                manager.set_active_shape(shape)
        backend.why_busy = None
        assert backend.calls == [] and manager.set_active_shape([128, 64]).overlap == LARGE

    def test_a_policy_that_the_backend_cannot_follow_changes_nothing(self) -> None:
        backend = FakeBackend()
        bad = Policy((1, 64), (SMALL, {"fc1_fprop": Choice(OverlapConfig("bulk"), "")}))
        with pytest.raises(UBUnsupportedError, match="fc1_fprop has no method 'bulk'"):
            make(backend, policy=bad)
        assert backend.calls == [] and backend.on_operand is None

    def test_auto_switches_too(self) -> None:
        manager, backend = make(policy=POLICY, auto=True)
        assert backend.on_operand is not None
        backend.on_operand("fc1_fprop", 8)
        assert backend.calls[1:] == [{"fc2_fprop": NONE}, 8] and manager.active == (8, 64)

    def test_a_living_manager_takes_another_policy_and_none(self) -> None:
        manager, backend = make(policy=POLICY)
        manager.set_active_shape([8, 64])
        manager.set_buffer_active_shape("fc1_fprop", [32, 64])
        backend.calls.clear()
        other = Policy((1, 16), ({"fc2_fprop": Choice(RING, "other")}, SMALL))
        manager.use_policy(other)
        assert backend.calls == [{"fc2_fprop": RING}] and manager.policy is other and backend.followed[-1] is True
        assert manager.active == (8, 64) and manager.buffer_active_shape("fc1_fprop") == (32, 64)
        assert manager.set_active_shape([4, 64]).overlap == other.stages[0]
        assert manager.set_active_shape([16, 64]).overlap == SMALL
        manager.use_policy(None)
        assert manager.policy is None and backend.followed[-1] is False
        assert manager.set_active_shape([16, 64]).overlap == {}
        assert manager.set_active_shape([128, 64]).overlap == {}
        assert backend.calls[1:] == [4, {"fc2_fprop": NONE}, 16, {}, 128]

    def test_the_same_policy_again_stands_where_it_stood(self) -> None:
        """Somebody else may have switched the backend."""
        manager, backend = make(policy=POLICY)
        manager.set_active_shape([8, 64])
        backend.switch({})
        manager.use_policy(POLICY)
        assert backend.calls[-1] == {"fc2_fprop": NONE} and manager.set_active_shape([8, 64]).overlap == SMALL

    @pytest.mark.parametrize("why", ["unknown", "type", "busy", "layers", "auto", "destroyed"])
    def test_a_refused_policy_changes_nothing(self, why: str) -> None:
        manager, backend = make(policy=POLICY)
        manager.set_active_shape([8, 64])
        wanted: Any = Policy((1,), (LARGE,))
        if why == "unknown":
            wanted = Policy((1, 64), (LARGE, {"fc1_fprop": Choice(OverlapConfig("bulk"), "")}))
        elif why == "type":
            wanted = "table.json"
        elif why == "busy":
            backend.why_busy = "a filled buffer"
        elif why == "layers":
            backend.cannot_follow = "this TE is not known"
        elif why == "auto":
            manager.auto, backend.auto_excludes_policy = True, "auto comes too late"
        else:
            manager.destroy()
        backend.calls.clear()
        text = {
            "unknown": "fc1_fprop has no method 'bulk'",
            "type": "'table.json' is no Policy: TuningTable.policy",
            "busy": "the policy cannot change now: a filled buffer",
            "layers": "this TE is not known",
            "auto": "auto comes too late",
            "destroyed": "after destroy",
        }[why]
        with pytest.raises((UBStateError, UBUnsupportedError), match=text):
            manager.use_policy(wanted)
        assert backend.calls == [] and manager.policy is POLICY
        backend.why_busy = None
        assert manager.set_active_shape([8, 64]).overlap == SMALL

    def test_auto_goes_back_to_the_configuration(self) -> None:
        manager, backend = make(policy=POLICY)
        backend.auto_excludes_policy = "auto comes too late"
        manager.auto = True
        manager.use_policy(None)
        assert manager.policy is None and backend.calls[-1] == {}

    def test_a_named_change_reaches_the_alternatives(self) -> None:
        backend = FakeBackend()
        other = dataclasses.replace(
            backend.specs["fc2_fprop"], name="fc2_fprop (ring_exchange)", method="ring_exchange"
        )
        backend.specs[other.name] = other
        manager, _ = make(backend)
        assert manager.set_active_shape([64, 64], names="fc2_fprop").updated == ("fc2_fprop", other.name)
        assert backend.calls == [("fc2_fprop", 64), (other.name, 64)]


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


@pytest.mark.parametrize("timeout", [0, -1.0, True, "20"])
def test_a_timeout_is_a_number_of_seconds(timeout: object) -> None:
    with pytest.raises(UBStateError, match="timeout = .*: it is a positive number of seconds, or None"):
        make(timeout_s=timeout)

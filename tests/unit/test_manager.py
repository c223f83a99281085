# SPDX-License-Identifier: Apache-2.0
"""The manager over a recording backend: what is applied when, and that a wrong call changes nothing."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.utils.checkpoint
from fake_backend import FakeBackend
from managers import make

from ub_dynamic.errors import (
    UBAlignmentError,
    UBCapacityError,
    UBShapeError,
    UBStateError,
    UBUnsupportedError,
)
from ub_dynamic.manager import Manager


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
        with pytest.raises(UBShapeError, match="T must be an int|tokens must be positive"):
            manager.round_up_tokens(tokens)  # type: ignore[arg-type]

    def test_limits(self) -> None:
        manager, _ = make()
        assert (manager.token_multiple(), manager.max_tokens()) == (4, 128)
        assert [manager.round_up_tokens(tokens) for tokens in (1, 4, 5, 125)] == [4, 4, 8, 128]
        with pytest.raises(UBCapacityError, match="T = 129 rounds up to 132.*128"):
            manager.round_up_tokens(129)


class TestNoneFollows:
    """Backends whose communicators have no active shape: they stay at capacity, or take T from their operands."""

    def test_capacity_alone(self) -> None:
        backend = FakeBackend()
        backend.specs, backend.capacity_only = {}, "install g++"
        manager = Manager(backend, (128, 64), check="never")
        assert (manager.token_multiple(), manager.max_tokens()) == (128, 128)
        assert [manager.round_up_tokens(tokens) for tokens in (1, 64, 128)] == [128] * 3
        for tokens in (64, 127):
            with pytest.raises(
                UBUnsupportedError, match=rf"T = {tokens}, all .* \[128, 64\]: install g\+\+; .* T is 128"
            ):
                manager.set_active_shape([tokens, 64])
        with pytest.raises(UBCapacityError, match="T = 129 tokens exceed the capacity of 128 tokens; .* T is 128"):
            manager.set_active_shape([129, 64])
        with pytest.raises(UBCapacityError, match="at most 128"):
            manager.round_up_tokens(129)
        assert manager.set_active_shape([128, 64]).updated == () and backend.calls == []

    def test_what_the_ranks_share_evenly(self) -> None:
        backend = FakeBackend()
        backend.specs = {}
        manager = Manager(backend, (130, 64), check="never")
        assert (manager.token_multiple(), manager.max_tokens(), manager.round_up_tokens(5)) == (4, 128, 8)
        with pytest.raises(UBAlignmentError, match=r"shape \[5, 64\]: T = 5 is not a multiple of tp = 4; .* T is 8"):
            manager.set_active_shape([5, 64])
        assert manager.set_active_shape([8, 64]).shape == (8, 64) and backend.calls == [8]

    def test_a_rank_alone_takes_every_t(self) -> None:
        backend = FakeBackend()
        backend.specs, backend.tp = {}, 1
        manager = Manager(backend, (127, 64))
        assert (manager.token_multiple(), manager.max_tokens()) == (1, 127)
        assert manager.set_active_shape([5, 64]).shape == (5, 64)


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
        with pytest.raises(UBUnsupportedError, match=r"proj_wgrad has no active shape, .* \[128, 64\]: external comm"):
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

    def test_nothing_is_set_after_destroy(self) -> None:
        manager, backend = make()
        manager.destroy()
        for call in (
            lambda: manager.set_active_shape(manager.capacity),
            lambda: manager.set_active_shape((64, 64)),
            lambda: manager.set_buffer_active_shape("fc1_fprop", (64, 64)),
        ):
            with pytest.raises(UBStateError, match="after destroy there are no communicators any more"):
                call()
        assert backend.calls == ["destroy"]

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


@pytest.mark.parametrize("timeout", [0, -1.0, True, "20"])
def test_a_timeout_is_a_number_of_seconds(timeout: object) -> None:
    with pytest.raises(UBStateError, match="timeout = .*: it is a positive, finite number of seconds, as 20 is"):
        make(timeout_s=timeout)

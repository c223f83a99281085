# SPDX-License-Identifier: Apache-2.0
"""The process-wide API: wrong order of calls, bad arguments, and that a failed start leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend

import ub_dynamic as ub
from ub_dynamic import api
from ub_dynamic.agreement import agree
from ub_dynamic.backends.names import GEMM_METHODS
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice, Policy
from ub_dynamic.policy_difference import sent_runs
from ub_dynamic.tuning_table import TuningRow, TuningTable, these_versions, this_machine


class FakeGroup:
    size = 4
    members = (0, 1, 2, 3)
    closed = 0

    def allgather(self, value: object, what: str) -> list[object]:
        return [value] * self.size

    def close(self) -> None:
        type(self).closed += 1


CALLS = {
    "set": lambda: ub.set_ub_active_shape([64, 64]),
    "reset": ub.reset_ub_active_shape,
    "get active": ub.get_ub_active_shape,
    "get capacity": ub.get_ub_capacity_shape,
    "context": lambda: ub.active_shape([64, 64]),
    "microbatch": lambda: ub.microbatch(64),
    "bind": lambda: ub.bind_backward(torch.ones(1), [64, 64]),
    "multiple": ub.token_multiple,
    "round up": lambda: ub.round_up_tokens(3),
    "max": ub.max_tokens,
    "set one": lambda: ub.set_buffer_active_shape("fc1_fprop", [64, 64]),
    "get one": lambda: ub.get_buffer_active_shape("fc1_fprop"),
    "get capacity of one": lambda: ub.get_buffer_capacity_shape("fc1_fprop"),
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBackend]:
    made = FakeBackend(tp=4)
    monkeypatch.setattr(api, "_create_host", lambda *_: made)
    monkeypatch.setattr(api, "tensor_parallel_group", lambda *_: FakeGroup())
    yield made
    ub.destroy_ub()


def initialize(**options: Any) -> Any:
    return ub.initialize_ub([128, 64], 4, backend="host", check="never", **options)


@pytest.mark.parametrize("call", CALLS)
def test_before_and_after(call: str, backend: FakeBackend) -> None:
    with pytest.raises(ub.UBStateError, match="call initialize_ub first"):
        CALLS[call]()
    initialize()
    assert ub.is_ub_initialized()
    CALLS[call]()
    ub.destroy_ub()
    assert not ub.is_ub_initialized()
    with pytest.raises(ub.UBStateError, match="call initialize_ub first"):
        CALLS[call]()


def test_a_second_initialisation_is_refused_and_destroy_is_idempotent(backend: FakeBackend) -> None:
    initialize()
    with pytest.raises(ub.UBStateError, match="call destroy_ub first"):
        initialize()
    ub.destroy_ub()
    ub.destroy_ub()
    assert backend.calls == ["destroy"]
    initialize()
    assert ub.get_ub_active_shape() == ub.get_ub_capacity_shape() == (128, 64)


def test_a_failure_after_the_backend_was_made_destroys_it(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(api, "Manager", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            initialize()
    assert backend.calls == ["destroy"] and not ub.is_ub_initialized()
    initialize()


def test_a_capacity_that_no_kernel_takes_is_refused_before_anything_is_made(backend: FakeBackend) -> None:
    with pytest.raises(ub.UBAlignmentError, match="T = 126"):
        ub.initialize_ub([126, 64], 4, backend="host", check="never")
    assert backend.calls == [] and not ub.is_ub_initialized()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "nccl"}, ["'nccl'", '"host"']),
        ({"backend": "host", "use_fp8": True}, ["FP8", "float32 and bfloat16"]),
        ({"backend": "host", "with_cublasmp": True}, ["cuBLASMp"]),
    ],
)
def test_unsupported(options: dict[str, Any], words: list[str], backend: FakeBackend) -> None:
    with pytest.raises(ub.UBUnsupportedError) as raised:
        ub.initialize_ub([128, 64], 4, check="never", **options)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert not ub.is_ub_initialized()


@pytest.mark.parametrize("shape", [[128], [128.0, 64], [0, 64], None])
def test_a_bad_capacity_is_named(shape: Any, backend: FakeBackend) -> None:
    with pytest.raises(ub.UBShapeError, match="capacity shape"):
        ub.initialize_ub(shape, 4, backend="host", check="never")


def test_a_world_that_does_not_fit() -> None:
    with pytest.raises(ub.UBShapeError, match="world of 1 rank.*tp_size = 2.*mpirun -n N"):
        ub.initialize_ub([128, 64], 2, backend="host")
    assert not ub.is_ub_initialized()


def test_auto_takes_the_host_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert api.choose_backend("auto") == "host"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(api, "find_spec", lambda name: object())
    assert api.choose_backend("auto") == "te"


def test_communicators_by_object_and_by_name(backend: FakeBackend) -> None:
    initialize()
    communicator = backend.objects["fc1_fprop"]
    ub.set_buffer_active_shape(communicator, [64, 64])
    assert ub.get_buffer_active_shape(communicator) == ub.get_buffer_active_shape("fc1_fprop") == (64, 64)
    assert ub.get_buffer_capacity_shape(communicator) == (128, 64)
    assert ub.get_ub_active_shape() == (128, 64)
    with pytest.raises(ub.UBStateError, match="no communicator of this initialize_ub"):
        ub.get_buffer_active_shape(object())


def test_the_whole_way(backend: FakeBackend) -> None:
    initialize()
    assert (ub.token_multiple(), ub.max_tokens(), ub.round_up_tokens(3)) == (4, 128, 4)
    with ub.microbatch(64) as mb:
        assert ub.get_ub_active_shape() == mb.shape == (64, 64)
        output = mb.bind_backward(torch.ones(1, requires_grad=True) * 2)
    with ub.active_shape([32, 64]):
        output.backward()
        assert ub.get_ub_active_shape() == (64, 64)
    assert ub.reset_ub_active_shape().shape == (128, 64)


RING, NONE = OverlapConfig("ring_exchange"), OverlapConfig("none")


def table(**other: Any) -> TuningTable:
    rows = (TuningRow("fc2_fprop", 16, NONE, "small"), TuningRow("fc2_fprop", 64, RING, "large"))
    header: dict[str, Any] = {
        "machine": this_machine(),
        "versions": these_versions(),
        "tp": 4,
        "hidden": 64,
        "ffn": 256,
    }
    header |= {"dtype": "bfloat16", "mode": "cpu-mpi", "date": "today", "command": "tune", **other}
    return TuningTable(**header, rows=rows)


class TestPolicy:
    @pytest.mark.parametrize("policy", [None, "always"])
    def test_as_configured(self, policy: Any, backend: FakeBackend) -> None:
        assert initialize(policy=policy).policy is None
        assert ub.set_ub_active_shape([64, 64]).overlap == {} and backend.calls == [64]

    @pytest.mark.parametrize("way", ["path", "text", "table", "policy"])
    def test_a_table(self, way: str, backend: FakeBackend, tmp_path: Path) -> None:
        path = table().save(tmp_path / "table.json")
        initialize(policy={"path": path, "text": str(path), "table": table(), "policy": table().policy()}[way])
        assert ub.set_ub_active_shape([32, 64]).overlap == {"fc2_fprop": (NONE, "small")}
        assert ub.set_ub_active_shape([36, 64]).overlap == {"fc2_fprop": (RING, "large")}

    def test_the_backend_is_given_every_alternative(
        self, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[Any] = []
        monkeypatch.setattr(api, "_create_host", lambda *args: given.append(args[-1]) or backend)
        initialize(policy=table())
        assert given == [{"fc2_fprop": (NONE, RING)}]

    def test_a_callable_is_asked_once_for_every_valid_t(self, backend: FakeBackend) -> None:
        asked: list[tuple[str, int]] = []

        def choose(gemm: str, tokens: int) -> OverlapConfig | None:
            asked.append((gemm, tokens))
            return NONE if gemm == "fc2_fprop" and tokens < 64 else None

        initialize(policy=choose)
        assert sorted(asked) == sorted((gemm, tokens) for gemm in GEMM_METHODS for tokens in range(4, 129, 4))
        assert ub.set_ub_active_shape([60, 64]).overlap == {"fc2_fprop": (NONE, "chosen by the callable")}
        assert len(asked) == 8 * 32

    @pytest.mark.parametrize(
        ("policy", "words"),
        [
            (table(tp=2, hidden=128), "measured elsewhere: tp is 2, here 4; hidden is 128, here 64"),
            (table(mode="2-gpus"), "mode is 2-gpus, here cpu-mpi"),
            ("missing.json", "missing.json cannot be read"),
            (3, 'policy = 3: it is None, "always", the path'),
            (Policy((1,), ({"fc2_fprop": Choice(OverlapConfig("bulk"), "")},)), "fc2_fprop has no method 'bulk'"),
            (lambda gemm, tokens: OverlapConfig("pipeline"), "fc1_fprop has no method 'pipeline'"),
            (lambda gemm, tokens: "none", "returned 'none' for qkv_fprop at T = 4"),
        ],
    )
    def test_a_policy_that_cannot_be_followed(self, policy: Any, words: str, backend: FakeBackend) -> None:
        with pytest.raises((ub.UBUnsupportedError, ub.UBShapeError), match=words):
            initialize(policy=policy)
        assert backend.calls == [] and not ub.is_ub_initialized()

    @pytest.mark.parametrize(
        ("gemm", "config", "words"),
        [
            ("fc3_fprop", NONE, "unknown GEMM 'fc3_fprop'; known are qkv_fprop"),
            ("fc2_fprop", OverlapConfig("bulk"), "fc2_fprop has no method 'bulk'; it has none, pipeline"),
            ("fc2_fprop", OverlapConfig("ring_exchange", aggregate=True), "the next valid value is False"),
        ],
    )
    def test_one_rank_checks_its_policy_too(
        self, gemm: str, config: OverlapConfig, words: str, backend: FakeBackend
    ) -> None:
        with pytest.raises(ub.UBUnsupportedError, match=words):
            ub.initialize_ub(
                [7, 63], 1, check="never", backend="host", policy=Policy((1,), ({gemm: Choice(config, "")},))
            )
        assert backend.calls == []
        fine = Policy((1,), ({"fc2_fprop": Choice(RING, "")},))
        ub.initialize_ub([7, 63], 1, check="never", backend="host", policy=fine)

    @pytest.mark.parametrize("ends", [SystemExit(3), KeyboardInterrupt(), ZeroDivisionError("so")])
    def test_a_callable_that_ends_the_process_tells_the_others(
        self, ends: BaseException, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[Any] = []
        monkeypatch.setattr(FakeGroup, "allgather", lambda self, value, what: told.append(value) or [value] * 4)

        def choose(gemm: str, tokens: int) -> OverlapConfig:
            raise ends

        with pytest.raises(type(ends)) as raised:
            initialize(policy=choose)
        assert raised.value is ends and backend.calls == []
        assert told[0][1] == f"{type(ends).__name__}: {ends}"

    def test_ranks_with_other_policies_learn_where_they_differ(
        self, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine, theirs = table().policy(), Policy((1,), ({"fc2_fprop": Choice(NONE, "")},))

        def allgather(self: FakeGroup, value: Any, what: str) -> list[Any]:
            if what == "comparing the policies of initialize_ub":
                return [value, value, value, sent_runs(theirs)]
            facts, refusal, digest = value
            return [value, value, value, (facts.replace(digest, theirs.digest()), refusal, theirs.digest())]

        monkeypatch.setattr(FakeGroup, "allgather", allgather)
        with pytest.raises(ub.UBRankMismatchError) as raised:
            initialize(policy=mine)
        assert "policies differ: fc2_fprop at T >= 33: ring_exchange on ranks 0, 1, 2, none on rank 3" in str(
            raised.value
        )
        assert backend.calls == []

    @pytest.mark.parametrize(("te", "auto"), [(True, True), (True, False), (False, True)])
    def test_on_te_an_operand_cannot_choose_how_its_own_layer_overlaps(self, te: bool, auto: bool) -> None:
        options = {"dtype": torch.bfloat16, "ub_cfgs": None, "check": "never", "timeout": None, "auto": auto}
        refused = pytest.raises(ub.UBUnsupportedError, match="auto=True takes T from an operand")
        with refused if te and auto else contextlib.nullcontext():
            agree(FakeGroup(), [128, 64], 4, te, options, table().policy())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"tp_size": "4"}, ub.UBShapeError, "tp_size = '4': it is a positive int"),
        ({"tp_size": 0}, ub.UBShapeError, "tp_size = 0"),
        ({"tp_size": True}, ub.UBShapeError, "tp_size = True"),
        ({"tp_group": [0, 1]}, ub.UBUnsupportedError, r"tp_group = \[0, 1\]: it is an mpi4py communicator"),
        ({"timeout": "20"}, ub.UBStateError, "timeout = '20': it is a positive, finite number of seconds"),
        ({"timeout": float("inf")}, ub.UBStateError, "timeout = inf: it is a positive, finite number of seconds"),
        ({"dtype": "float32"}, ub.UBUnsupportedError, "dtype = 'float32': it is a torch.dtype"),
        ({"check": "often"}, ub.UBStateError, 'check = .often.: it is "deferred"'),
        ({"ub_cfgs": 3}, ub.UBShapeError, "ub_cfgs = 3: it maps communicator names"),
        ({"ub_cfgs": [{}]}, ub.UBUnsupportedError, "takes one ub_cfgs mapping"),
        ({"ub_cfgs": {"fc3_fprop": {}}}, ub.UBShapeError, "unknown communicator 'fc3_fprop'"),
        ({"ub_cfgs": {"fc2_fprop": "ring"}}, ub.UBShapeError, r"ub_cfgs\['fc2_fprop'\] = 'ring': it maps settings"),
        (
            {"ub_cfgs": {"fc2_fprop": {"splits": 2}}},
            ub.UBShapeError,
            "fc2_fprop: unknown setting 'splits'; known are m",
        ),
        (
            {"ub_cfgs": {"fc1_dgrad": {"num_sm": "16"}}},
            ub.UBShapeError,
            "fc1_dgrad: num_sm = '16': it is a positive int",
        ),
        ({"ub_cfgs": {"fc1_dgrad": {"num_sm": torch.tensor(4.5)}}}, ub.UBShapeError, "fc1_dgrad: num_sm = tensor"),
        ({"ub_cfgs": {"fc2_fprop": {"num_splits": None}}}, ub.UBShapeError, "fc2_fprop: num_splits = None: it is a"),
        ({"ub_cfgs": {"fc1_dgrad": {"num_sm": 33}}}, ub.UBShapeError, "num_sm = 33, .* the next valid value is 32"),
        ({"shape": [126, 64]}, ub.UBAlignmentError, r"T = 126 .*; the next valid capacity is \[128, 64\]"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], words: str, backend: FakeBackend
) -> None:
    with pytest.raises(error, match=words) as raised:
        ub.initialize_ub(**{"shape": [128, 64], "tp_size": 4, "backend": "host", "check": "never", **arguments})
    assert type(raised.value) is error and backend.calls == [] and not ub.is_ub_initialized()


def test_the_timeout_bounds_the_waits_of_the_board_too(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def board(group: Any, *, timeout_s: float) -> Any:
        raise ZeroDivisionError(timeout_s)

    monkeypatch.setattr(api, "RankBoard", board)
    with pytest.raises(ZeroDivisionError, match=r"^3\.5$"):
        ub.initialize_ub([128, 64], 4, backend="host", timeout=3.5)


def test_every_mode_is_checked_before_the_others_are_told() -> None:
    options = {"dtype": torch.bfloat16, "check": "never", "timeout": None, "auto": False}
    none, fp8 = SimpleNamespace(value="none"), SimpleNamespace(value="fp8")
    ring = {"qkv_dgrad": {"method": "ring_exchange"}}
    for modes, cfgs, error, words in [
        ([fp8, none], [{}, {"proj_fprop": {"num_sm": 33}}], ub.UBShapeError, "proj_fprop .*num_sm = 33"),
        ([none, fp8], [{}, {"fc2_fprop": {"num_splits": 3}}], ub.UBAlignmentError, "num_splits = 24"),
        ([none, fp8], [{}], ub.UBShapeError, "1 entries for 2 quantization modes"),
        ([fp8, fp8], None, ub.UBShapeError, "names a mode twice"),
        ([none, fp8], ring, ub.UBUnsupportedError, "in one quantization mode only"),
        (["fp8"], None, ub.UBUnsupportedError, r"quantization_modes = \['fp8'\]: it is a list of TE's UserBufferQ"),
        (fp8, None, ub.UBUnsupportedError, "quantization_modes = .*: it is a list of TE's UserBufferQ"),
    ]:
        with pytest.raises(error, match=words):
            agree(FakeGroup(), [128, 64], 4, True, {**options, "quantization_modes": modes, "ub_cfgs": cfgs}, None)


def test_with_cublasmp_ranks_share_t_evenly_and_no_rule_of_userbuffers_is_asked() -> None:
    options = {"dtype": torch.bfloat16, "ub_cfgs": None, "check": "never", "timeout": None, "auto": False}
    with pytest.raises(ub.UBAlignmentError, match="H = 9 must be a multiple of 8"):
        agree(FakeGroup(), [36, 9], 4, True, options, None)
    options["with_cublasmp"] = True
    assert agree(FakeGroup(), [36, 9], 4, True, options, None) == ((36, 9), None)
    with pytest.raises(ub.UBAlignmentError, match="T = 34 .* tp = 4; the next valid T is 36"):
        agree(FakeGroup(), [34, 9], 4, True, options, None)


def test_an_fp8_mode_is_bounded_by_its_own_buffers() -> None:
    """At this size a ring all-gather of BF16 passes 32-bit offsets, one of FP8 does not."""
    options = {"dtype": torch.bfloat16, "ub_cfgs": None, "check": "never", "timeout": None, "auto": False}
    shape = [100_000, 16_384]
    with pytest.raises(ub.UBCapacityError, match="qkv_fprop .* int offset overflow"):
        agree(FakeGroup(), shape, 8, True, options, None)
    for mode in ({"use_fp8": True}, {"quantization_modes": [SimpleNamespace(value="fp8")]}):
        assert agree(FakeGroup(), shape, 8, True, {**options, **mode}, None) == (tuple(shape), None)

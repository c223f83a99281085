# SPDX-License-Identifier: Apache-2.0
"""TE's token rules against the index arithmetic of its kernels, written out step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ub_dynamic.backends.names import LAYERS, resolve_specs
from ub_dynamic.errors import UBAlignmentError, UBCapacityError, UBShapeError
from ub_dynamic.rules import TokenRule, check_spec, check_tokens, combine, token_rule
from ub_dynamic.shapes import CommSpec

INT_MAX = 2**31 - 1
INSTANTIATED = {2, 4, 8, 16, 32}


def kernels_are_correct(spec: CommSpec, tokens: int) -> bool:
    """Whether the kernels move exactly rank r's rows to exactly where rank r's rows belong, for every r."""
    hidden, tp, size = spec.capacity[1], spec.tp, spec.dtype.itemsize
    if not 0 < tokens <= spec.capacity[0] or tokens % tp:
        return False
    local = tokens // tp * hidden
    if spec.method == "ring_exchange":
        return _ring_is_correct(spec, local, size)
    if tp not in INSTANTIATED:
        return False
    if spec.method == "bulk":
        elements = tokens * hidden * size // 2  # the collective counts two-byte elements
        if elements < 64 or elements > INT_MAX or tokens * hidden * size % 2:
            return False
        lines = elements // 8 // tp
        return all(rank * lines * 16 == rank * local * size for rank in range(tp)) and lines * 16 == local * size
    splits = spec.num_splits
    width = hidden // splits
    elements = width * tokens
    if elements < 64 or tokens * hidden > INT_MAX or width * splits != hidden:
        return False
    lines, row_lines = elements // 8 // tp, width // 8
    return row_lines * 8 == width and lines * 8 == tokens // tp * width


def _ring_is_correct(spec: CommSpec, local: int, size: int) -> bool:
    chunk_bytes = local * size
    if spec.collective == "ag":
        last_offset = chunk_bytes * (spec.tp - 1)
        copied = chunk_bytes if spec.use_ce else chunk_bytes // 16 * 16
        return last_offset <= INT_MAX and copied == chunk_bytes
    last_offset = chunk_bytes * (2 * spec.tp - 2)
    reduced = local // 32 * 32
    return last_offset <= INT_MAX and reduced == local


@st.composite
def cases(draw: st.DrawFn) -> tuple[CommSpec, int]:
    method, collective = draw(
        st.sampled_from(
            [("bulk", "ag"), ("bulk", "rs"), ("pipeline", "rs"), ("ring_exchange", "ag"), ("ring_exchange", "rs")]
        )
    )
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    if method == "ring_exchange" and collective == "rs":
        assume(tp > 1)  # one rank reduces nothing
    hidden = draw(st.one_of(st.integers(1, 300), st.sampled_from([1024, 1032, 4096, 8192, 16384, 16384 * 4])))
    # from tiny to around every 32-bit edge
    edge = INT_MAX * tp // (2 * hidden * draw(st.sampled_from([1, max(1, tp - 1), max(1, 2 * tp - 2)])))
    tokens = draw(st.one_of(st.integers(0, 200), st.integers(max(0, edge - 40), edge + 40), st.integers(0, 2**31)))
    tokens += draw(st.sampled_from([0, -tokens % tp, -tokens % (8 * tp), -tokens % (32 * tp)]))
    capacity = draw(st.sampled_from([tokens, tokens + tp, 2**31 * tp, max(tp, tokens - 1)]))
    spec = CommSpec(
        "x",
        method,
        collective,
        (capacity, hidden),
        tp,
        draw(st.sampled_from([torch.bfloat16, torch.uint8]))
        if method != "pipeline" and collective == "ag"
        else torch.bfloat16,
        num_splits=draw(st.integers(1, 8)),
        num_sm=1,
        use_ce=draw(st.booleans()),
    )
    return spec, tokens


def accepted(spec: CommSpec, tokens: int) -> bool:
    try:
        check_spec(spec)
        check_tokens(spec, tokens)
    except UBShapeError:
        return False
    return True


@settings(max_examples=4500, deadline=None)
@given(cases())
def test_the_rules_accept_exactly_what_the_kernels_compute(case: tuple[CommSpec, int]) -> None:
    spec, tokens = case
    assert accepted(spec, tokens) == kernels_are_correct(spec, tokens)


@settings(max_examples=1500, deadline=None)
@given(cases())
def test_token_rule_and_check_tokens_say_the_same(case: tuple[CommSpec, int]) -> None:
    spec, tokens = case
    try:
        check_spec(spec)
    except UBShapeError:
        assume(False)
    rule = token_rule(spec)
    assert rule.accepts(tokens) == accepted(spec, tokens)
    if rule.minimum <= rule.maximum and tokens <= rule.maximum:
        valid = rule.round_up(tokens)
        assert accepted(spec, valid) and valid >= tokens
        assert not any(accepted(spec, between) for between in range(max(tokens, valid - 50), valid))


@pytest.mark.parametrize(
    ("tp", "hidden", "ring_ag", "ring_rs", "bulk"),
    [  # the largest T, rounded down to a multiple of tp
        (2, 4096, 524286, 262142, 524286),
        (4, 4096, 349524, 174760, 524284),
        (8, 4096, 299592, 149792, 524280),
        (2, 16384, 131070, 65534, 131070),
        (8, 16384, 74896, 37448, 131064),
    ],
)
def test_known_largest_tokens(tp: int, hidden: int, ring_ag: int, ring_rs: int, bulk: int) -> None:
    def largest(method: str, collective: str) -> int:
        return token_rule(CommSpec("x", method, collective, (10**6, hidden), tp, torch.bfloat16)).maximum  # type: ignore[arg-type]

    assert largest("ring_exchange", "ag") == ring_ag
    assert largest("ring_exchange", "rs") == ring_rs
    assert largest("bulk", "rs") == largest("pipeline", "rs") == bulk


def test_the_usual_multiple_is_tp() -> None:
    for tp in (2, 4, 8):
        specs = resolve_specs((8192, 4096), tp, torch.bfloat16)
        assert combine(map(token_rule, specs), 8192) == TokenRule(tp, tp, 8192)


def test_an_odd_hidden_size_needs_a_larger_multiple() -> None:
    ring_rs = {"proj_fprop": {"method": "ring_exchange"}, "fc2_fprop": {"method": "ring_exchange"}}
    specs = resolve_specs((8192, 1032), 2, torch.bfloat16, ring_rs)
    rule = combine(map(token_rule, specs), 8192)
    assert rule.multiple == 2 * 4  # 1032 = 8 * 129: c % 32 == 0 needs T % (4 * tp) == 0
    with pytest.raises(UBAlignmentError, match="multiple of 32.*next valid T is 8"):
        check_tokens(next(spec for spec in specs if spec.name == "proj_fprop"), 2)


def test_without_communicators_every_token_count_fits() -> None:
    assert combine([], 7) == TokenRule(1, 1, 7)


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (CommSpec("qkv_dgrad", "bulk", "ag", (60, 64), 3, torch.bfloat16), UBShapeError, ["tp = 3", "valid tp is 4"]),
        (
            CommSpec("fc2_fprop", "pipeline", "rs", (64, 40), 2, torch.bfloat16),
            UBAlignmentError,
            ["H = 40", "32", "64"],
        ),
        (
            CommSpec("x", "ring_exchange", "ag", (60, 64), 3, torch.bfloat16, aggregate=True),
            UBShapeError,
            ["aggregate", "even"],
        ),
        (
            CommSpec("x", "ring_exchange", "ag", (60, 64), 2, torch.bfloat16, use_ce=False, num_sm=6),
            UBAlignmentError,
            ["num_sm = 6", "must be 1"],
        ),
        (
            CommSpec("x", "ring_exchange", "ag", (60, 64), 2, torch.bfloat16, use_ce=False, num_sm=0),
            UBShapeError,
            ["num_sm = 0", "at least 1"],
        ),
        *(
            (CommSpec("x", *use, (64, 64), 2, torch.bfloat16, num_sm=33), UBShapeError, ["num_sm = 33", "value is 32"])
            for use in (("bulk", "ag"), ("bulk", "rs"), ("pipeline", "rs"))
        ),
        (
            CommSpec("x", "ring_exchange", "ag", (64, 64), 2, torch.bfloat16, use_ce=False, num_sm=64),
            UBShapeError,
            ["num_sm = 64", "next valid value is 32"],
        ),
        (
            CommSpec("x", "pipeline", "rs", (64, 64), 2, torch.bfloat16, num_splits=0),
            UBShapeError,
            ["num_splits = 0", "next valid value is 1"],
        ),
    ],
)
def test_bad_specs(spec: CommSpec, error: type[UBShapeError], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        check_spec(spec)
    assert type(raised.value) is error and all(word in str(raised.value) for word in words), str(raised.value)


def test_copy_engines_and_32_sms_are_taken() -> None:
    check_spec(CommSpec("x", "ring_exchange", "ag", (64, 64), 2, torch.bfloat16, num_sm=33))
    for method, collective in (("bulk", "ag"), ("pipeline", "rs")):
        check_spec(CommSpec("x", method, collective, (64, 64), 2, torch.bfloat16, num_sm=32))  # type: ignore[arg-type]


def test_more_than_one_sm_for_ring_copies_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="run ahead of its sender"):
        check_spec(CommSpec("x", "ring_exchange", "ag", (64, 64), 2, torch.bfloat16, use_ce=False, num_sm=4))


@pytest.mark.parametrize(
    ("method", "collective", "hidden", "tokens", "error", "words"),
    [
        ("bulk", "ag", 64, 130, UBCapacityError, ["T = 130", "largest valid T is 128"]),
        ("bulk", "ag", 64, 127, UBAlignmentError, ["T = 127", "tp = 4", "next valid T is 128"]),
        ("bulk", "ag", 6, 20, UBAlignmentError, ["30 elements", "multiple of 8", "next valid T is 32"]),
        ("bulk", "rs", 8, 4, UBAlignmentError, ["32 elements", "below 64", "next valid T is 8"]),
        ("ring_exchange", "rs", 8, 4, UBAlignmentError, ["multiple of 32", "next valid T is 16"]),
        ("bulk", "ag", 64, 0, UBShapeError, ["T = 0", "positive", "next valid T is 4"]),
    ],
)
def test_bad_tokens(
    method: str, collective: str, hidden: int, tokens: int, error: type[UBShapeError], words: list[str]
) -> None:
    spec = CommSpec("qkv_dgrad", method, collective, (128, hidden), 4, torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(error) as raised:
        check_tokens(spec, tokens)
    assert type(raised.value) is error
    assert all(word in str(raised.value) for word in ["qkv_dgrad", *words]), str(raised.value)


def test_int_overflow_names_the_limit() -> None:
    spec = CommSpec("qkv_fprop", "ring_exchange", "ag", (2**20, 16384), 8, torch.bfloat16)
    with pytest.raises(UBCapacityError, match="TE int offset overflow.*74898"):
        check_tokens(spec, 80000)


ONE_SPLIT = {"proj_fprop": {"num_splits": 1}, "fc2_fprop": {"num_splits": 1}}


class TestNames:
    def test_defaults(self) -> None:
        specs = {spec.name: spec for spec in resolve_specs((4096, 1024), 2, torch.bfloat16)}
        assert list(specs) == list(LAYERS)
        assert (specs["qkv_fprop"].method, specs["qkv_fprop"].collective) == ("ring_exchange", "ag")
        assert (specs["proj_fprop"].method, specs["proj_fprop"].num_splits) == ("pipeline", 4)
        assert (specs["fc1_wgrad"].method, specs["fc1_wgrad"].collective) == ("bulk", "rs")

    def test_dgrad_reduce_scatter_removes_the_wgrad_communicator(self) -> None:
        specs = {
            spec.name: spec
            for spec in resolve_specs((4096, 1024), 2, torch.bfloat16, {"qkv_dgrad": {"method": "ring_exchange"}})
        }
        assert specs["qkv_dgrad"].collective == "rs" and "qkv_wgrad" not in specs and "fc1_wgrad" in specs

    @pytest.mark.parametrize(
        ("cfgs", "words"),
        [
            ({"qvk_fprop": {}}, ["qvk_fprop", "qkv_fprop"]),
            ({"qkv_fprop": {"method": "tree"}}, ["tree", "ring_exchange"]),
            ({"qkv_fprop": {"method": "pipeline"}}, ["qkv_fprop", "reduce-scatter only"]),
            ({"qkv_dgrad": {"method": "pipeline"}, "qkv_wgrad": {"num_sm": 4}}, ["qkv_dgrad", "qkv_wgrad"]),
        ],
    )
    def test_bad_configurations(self, cfgs: dict[str, dict[str, object]], words: list[str]) -> None:
        with pytest.raises(UBShapeError) as raised:
            resolve_specs((4096, 1024), 2, torch.bfloat16, cfgs)
        assert all(word in str(raised.value) for word in words), str(raised.value)

    @pytest.mark.parametrize(
        ("shape", "cfgs", "error", "valid"),
        [
            (
                (4097, 1024),
                {},
                UBAlignmentError,
                "T = 4097 is not a multiple of tp = 2.*; the next valid capacity is [4098, 1024]",
            ),
            ((2, 24), ONE_SPLIT, UBAlignmentError, "moves nothing below 64 .*; the next valid capacity is [4, 24]"),
            ((1 << 22, 1024), {}, UBCapacityError, "the limit is .*; the largest valid capacity is [2097150, 1024]"),
        ],
    )
    def test_a_capacity_that_does_not_fit_names_the_next_one(
        self, shape: tuple[int, int], cfgs: dict[str, dict[str, object]], error: type[UBShapeError], valid: str
    ) -> None:
        with pytest.raises(error, match=valid.replace("[", r"\[")) as raised:
            resolve_specs(shape, 2, torch.bfloat16, cfgs)
        assert str(raised.value).startswith(f"capacity [{shape[0]}, {shape[1]}]: ")
        assert "no larger T fits" not in str(raised.value)


def test_an_fp8_pipeline_needs_whole_lines() -> None:
    for dtype, hidden in ((torch.bfloat16, 1056), (torch.uint8, 1088)):
        check_spec(CommSpec("fc2_fprop", "pipeline", "rs", (4096, hidden), 2, dtype))
    with pytest.raises(UBAlignmentError, match=r"H = 1056 must be a multiple of 16 \* num_splits = 64; .* H is 1088"):
        check_spec(CommSpec("fc2_fprop", "pipeline", "rs", (4096, 1056), 2, torch.uint8))

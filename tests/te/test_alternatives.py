# SPDX-License-Identifier: Apache-2.0
"""The communicators that a choice by T takes: what TE is given instead, what is made beside it, on whose memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import fakes
import policy_te
import pytest
import torch
import transformer_engine.pytorch.module.base as base
from cpu_te import CAPACITY, HIDDEN, TP
from policy_te import AGGREGATE, BULK, NONE, PIPELINE, RING, te_world

from ub_dynamic.backends.names import GEMM_METHODS, LAYERS
from ub_dynamic.backends.te import alternatives, initialize
from ub_dynamic.backends.te.alternatives import alone, arrange
from ub_dynamic.errors import UBCapacityError, UBShapeError, UBUnsupportedError
from ub_dynamic.overlap import OverlapConfig

RING_CFG = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False}
MODE = fakes.MODES.NONE


def arranged(choices: dict[str, Any], cfgs: Any = None) -> Any:
    return arrange(choices, cfgs, (CAPACITY, HIDDEN), TP, torch.bfloat16)


def keywords_by_layer(patch: pytest.MonkeyPatch, ub_cfgs: Any) -> dict[str, dict[str, Any]]:
    """What TE's own function gives each communicator, without a policy."""
    with policy_te.stock(patch):
        base.initialize_ub([CAPACITY, HIDDEN], TP, quantization_modes=[MODE], ub_cfgs=ub_cfgs, bootstrap_backend="gloo")
        layers = [layer for layer, _ in base._ub_communicators]
        return {layer: keywords for layer, (_, _, keywords) in zip(layers, policy_te.made, strict=True)}


def test_one_method_takes_one_communicator() -> None:
    wider = OverlapConfig("pipeline", num_splits=8)
    found = arranged({"qkv_fprop": (AGGREGATE, NONE), "proj_fprop": (PIPELINE, wider), "fc1_dgrad": (BULK,)})
    assert found.further == ()
    assert found.ub_cfgs["proj_fprop"]["num_splits"] == 8
    assert found.ub_cfgs["proj_fprop"]["method"] == "pipeline"
    assert set(found.ub_cfgs) == {"proj_fprop"}


@pytest.mark.parametrize(("splits", "made"), [(1, 4), (2, 4), (4, 4), (8, 8)])
def test_a_pipeline_gets_all_streams(splits: int, made: int) -> None:
    cfgs = {"fc2_fprop": {"num_splits": 1}}
    found = arranged({"fc2_fprop": (OverlapConfig("pipeline", num_splits=splits),)}, cfgs)
    assert found.ub_cfgs["fc2_fprop"]["num_splits"] == made
    assert found.gemms["fc2_fprop"].splits == splits


def test_the_ring_reduce_scatter_owns_the_memory() -> None:
    found = arranged({"fc2_fprop": (RING, PIPELINE), "proj_fprop": (RING,)}, {"proj_fprop": {"num_sm": 2}})
    assert found.ub_cfgs == {"fc2_fprop": RING_CFG, "proj_fprop": RING_CFG}
    assert [(each.layer, each.owner) for each in found.further] == [
        ("fc2_fprop", "fc2_fprop (ring_exchange)"), ("proj_fprop", "proj_fprop (ring_exchange)")
    ]  # fmt: skip
    assert found.further[1].settings["num_sm"] == 2
    configured = arranged({"fc2_fprop": (PIPELINE,)}, {"fc2_fprop": RING_CFG})
    assert [(each.layer, each.owner) for each in configured.further] == [("fc2_fprop (pipeline)", "fc2_fprop")]


def test_a_dgrad_of_two_methods_keeps_its_wgrad() -> None:
    found = arranged({"fc1_dgrad": (RING, BULK)}, {"fc1_wgrad": {"num_sm": 8}, "fc1_dgrad": {"num_sm": 4}})
    assert found.ub_cfgs == {"fc1_dgrad": RING_CFG}
    assert [(each.layer, each.owner, each.settings["num_sm"]) for each in found.further] == [
        ("fc1_dgrad", "fc1_dgrad (ring_exchange)", 4), ("fc1_wgrad", None, 8)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("choices", "cfgs", "kind", "text"),
    [
        ({"fc1_wgrad": (BULK,)}, None, UBUnsupportedError, "unknown GEMM 'fc1_wgrad'"),
        ({"qkv_fprop": (PIPELINE,)}, None, UBUnsupportedError, "no method 'pipeline'"),
        ({"fc2_fprop": (AGGREGATE,)}, None, UBUnsupportedError, "aggregate"),
        ({"fc1_dgrad": (OverlapConfig("pipeline"),)}, None, UBUnsupportedError, "silently wrong"),
        ({"fc1_dgrad": (OverlapConfig("bulk", num_sm=33),)}, None, UBShapeError, "the next valid value is 32"),
        ({"fc2_fprop": (OverlapConfig("pipeline", num_splits=16),)}, None, UBShapeError, "num_splits = 128"),
        ({"fc2_fprop": (PIPELINE,)}, {"fc2_fprop": {"atomic_gemm": True}}, UBUnsupportedError, "nothing to choose"),
    ],
)
def test_refused_before_anything_is_made(
    choices: dict[str, Any], cfgs: Any, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kind, match=text):
        arranged(choices, cfgs)
    with pytest.raises(kind, match=text), te_world(monkeypatch, choices, cfgs):
        pass
    assert policy_te.made == []


def test_more_regions_than_te_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "MAX_REGIONS", 12)
    with pytest.raises(UBCapacityError, match=r"takes 1 communicators.*13 in all.*at most 12 buffers"):
        arranged({"fc2_fprop": (RING,)})
    with pytest.raises(UBCapacityError, match=r"takes 2 communicators.*14 in all"):
        arranged({"qkv_dgrad": (RING,), "fc1_dgrad": (RING,)})  # their wgrads are TE's own
    refused = pytest.raises(UBCapacityError, match="13 in all")
    with refused, te_world(monkeypatch, {"fc2_fprop": (RING,)}):
        pass
    assert policy_te.made == []


def test_a_region_that_te_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policy_te.limit, "regions", 12)
    with (
        pytest.raises(UBCapacityError, match="fc2_fprop: TE has no region left"),
        te_world(monkeypatch, {"fc2_fprop": (RING,)}),
    ):
        pass
    assert base._ub_communicators is None


@pytest.mark.parametrize(
    ("gemm", "choice", "cfgs"),
    [
        ("fc2_fprop", RING, None),
        ("fc2_fprop", RING, {"fc2_fprop": {"num_sm": 4, "num_splits": 2, "cga_size": 1, "set_sm_margin": False}}),
        ("proj_fprop", OverlapConfig("pipeline"), {"proj_fprop": RING_CFG}),
        ("fc1_dgrad", RING, {"fc1_dgrad": {"num_sm": 4}}),
        ("qkv_dgrad", BULK, {"qkv_dgrad": {"method": "ring_exchange"}}),
    ],
)
def test_further_communicators_are_made_as_te_makes_them(
    gemm: str, choice: OverlapConfig, cfgs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keywords are those that TE gives when this configuration is all there is."""
    with te_world(monkeypatch, {gemm: (choice,)}, cfgs) as world:
        assert len(base._ub_communicators) == len(policy_te.made) == 13
        kind, shape, keywords = policy_te.made[-1]
        configured = world.backend._plans._arrangement.gemms[gemm].configured
    method = "pipeline" if "fprop" in gemm else "bulk"
    wanted = cfgs if configured == method else alone(gemm, OverlapConfig(method), cfgs)
    expected = keywords_by_layer(monkeypatch, wanted)
    if method == "pipeline":
        keywords = {**keywords, "num_splits": expected[gemm]["num_splits"]}  # room for other choices
    assert (kind, shape) == ("CommOverlap", (8 * TP, HIDDEN))
    assert keywords == expected[gemm]


@pytest.mark.parametrize(("margin", "math_sms"), [(True, 124), (False, 132)])
def test_te_makes_the_wgrad_of_a_ring_dgrad_all_the_same(
    margin: bool, math_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one under its name would end the first, and with it the shared communicator."""
    cfgs = {"fc1_wgrad": {"num_sm": 8, "set_sm_margin": margin}}
    with te_world(monkeypatch, {"fc1_dgrad": (RING,)}, cfgs) as world:
        assert len(base._ub_communicators) == len(policy_te.made) == 13
        assert world.settings("fc1_wgrad") == (4, 8, math_sms)
    with pytest.raises(UBUnsupportedError, match=r"fc1_wgrad: \['cga_size'\] cannot be configured while"):
        arranged({"fc1_dgrad": (RING,)}, {"fc1_wgrad": {"cga_size": 1}})


WAYS = [(gemm, method) for gemm, methods in GEMM_METHODS.items() for method in methods if method != "none"]


@pytest.mark.parametrize(("gemm", "method"), [way for way in WAYS if way[1] != "pipeline" or "fprop" in way[0]])
def test_alone_is_what_te_takes(gemm: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfgs = {gemm: {"num_sm": 2}}
    found = keywords_by_layer(monkeypatch, alone(gemm, OverlapConfig(method), cfgs))[gemm]
    own = method == LAYERS[gemm][0]
    assert found["num_comm_sm"] == (2 if own else 1 if method == "ring_exchange" else 16)
    assert found["set_sm_margin"] == (method != "ring_exchange")


def test_all_share_the_owners_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch, {"fc2_fprop": (RING, PIPELINE), "fc1_dgrad": (RING,)}) as world:
        specs = world.backend.specs
        for base_name, ring in (("fc2_fprop", "fc2_fprop (ring_exchange)"), ("fc1_dgrad", "fc1_dgrad (ring_exchange)")):
            mine, owner = world.facts(base_name), world.facts(ring)
            assert mine["data_ptr"] == owner["data_ptr"] == world.object(ring).memory.data_ptr()
            assert mine["region"] == owner["region"]
            assert owner["shape"] == (CAPACITY // TP * (2 * TP - 1), HIDDEN)
            assert specs[base_name].capacity == specs[ring].capacity == (CAPACITY, HIDDEN)
            assert (specs[ring].method, specs[ring].collective) == ("ring_exchange", "rs")
        assert (specs["fc1_dgrad"].method, specs["fc1_dgrad"].collective) == ("bulk", "ag")
        assert (specs["fc1_wgrad"].method, specs["fc1_wgrad"].collective) == ("bulk", "rs")
        assert (specs["fc2_fprop"].method, specs["fc2_fprop"].collective) == ("pipeline", "rs")
        assert world.facts("fc1_wgrad")["data_ptr"] == world.object("fc1_wgrad").memory.data_ptr()
        for tokens in (64, CAPACITY, 16):
            world.backend.apply(tokens)
            assert {world.backend.active_tokens(name) for name in specs} == {tokens}
            for name in ("fc2_fprop", "fc1_dgrad", "fc1_wgrad"):
                assert world.facts(name)["shape"] == (tokens, HIDDEN)
        assert list(specs)[:10] == [name for name in specs if "(" not in name]


def test_adopt_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    native = policy_te.fakes.native.load()
    small, owner = fakes.communicator(False, (16, 64), 2), fakes.communicator(True, (64, 64), 2, reduce_scatter=True)
    before = native.inspect(small)
    for other in (
        fakes.communicator(True, (64, 32), 2),
        fakes.communicator(True, (64, 64), 4),
        fakes.communicator(True, (64, 64), 2, dtype=torch.uint8),
        fakes.communicator(True, (64, 64), 2, region=-1),
        fakes.communicator(True, (32, 64), 2),
    ):
        with pytest.raises(ValueError, match="does not hold 64 rows"):
            native.adopt(small, other, 64)
    with pytest.raises(TypeError, match="a ring exchange owns its memory"):
        native.adopt(owner, small, 16)
    assert native.inspect(small) == before
    native.adopt(small, owner, 64)
    assert native.inspect(small)["shape"] == (64, 64)


def test_bf16_of_te_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [MODE, fakes.MODES.FP8]
    for changes, text in (
        ({"use_fp8": True}, r"BF16 alone.*\['fp8'\]"),
        ({"quantization_modes": modes}, "BF16 alone"),
        ({"with_cublasmp": True}, "cuBLASMp"),
    ):
        with (
            pytest.raises(UBUnsupportedError, match=text),
            te_world(monkeypatch, {"fc2_fprop": (RING,)}, **changes),
        ):  # fmt: skip
            pass
    assert base._ub_communicators is None


def test_without_the_native_file_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise UBUnsupportedError("install g++")

    monkeypatch.setattr(initialize.native_file, "load", missing)
    with (
        pytest.raises(UBUnsupportedError, match=r"a policy needs the native file: rank 0: install g\+\+"),
        te_world(monkeypatch, {"fc2_fprop": (RING,)}),
    ):
        pass
    assert policy_te.made == []


def test_a_failed_self_test_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch(*_: Any) -> None:
        raise UBUnsupportedError("not what this package knows")

    monkeypatch.setattr(initialize.native_file, "self_test", mismatch)
    with (
        pytest.raises(UBUnsupportedError, match="a policy needs the native file.*not what this package knows"),
        te_world(monkeypatch, {"fc2_fprop": (RING,)}),
    ):
        pass
    assert base._ub_communicators is None


def test_destroy_leaves_nothing_alive(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with te_world(monkeypatch, {"fc2_fprop": (RING,), "fc1_dgrad": (RING,)}) as world:
        backend = world.backend
        backend.switch(backend.plan({"fc2_fprop": RING, "fc1_dgrad": RING}))
        references = [comm.reference for comm in backend.communicators]
        assert len(references) == 14
        plan = backend.plan({})
        assert all(isinstance(reference, weakref.ref) for reference in references)
        backend.destroy()
        gc.collect()
        assert not [reference for reference in references if reference() is not None]
        assert not caplog.records
        with pytest.raises(RuntimeError, match="another registry"):
            backend.switch(plan)


def test_a_failure_half_way_leaves_te_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = policy_te.Overlap.__init__

    def out_of_memory(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(policy_te.made) == 12:
            raise RuntimeError("cudaMalloc failed")
        fail(self, *args, **kwargs)

    monkeypatch.setattr(policy_te.Overlap, "__init__", out_of_memory)
    with (
        pytest.raises(RuntimeError, match="cudaMalloc failed"),
        te_world(monkeypatch, {"fc2_fprop": (RING,), "proj_fprop": (RING,)}),
    ):
        pass
    assert base._ub_communicators is None
    monkeypatch.undo()
    with te_world(monkeypatch, {"fc2_fprop": (RING,)}):
        pass

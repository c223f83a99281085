# SPDX-License-Identifier: Apache-2.0
"""What initialize_ub makes in each quantization mode, against TE's own code."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import fakes
import policy_te
import pytest
import torch
import transformer_engine.pytorch.module.base as base
from cpu_te import CAPACITY, HIDDEN, TP

from ub_dynamic.backends.names import LAYERS
from ub_dynamic.backends.quantization import resolve_modes
from ub_dynamic.backends.te.communicators import communicator_name
from ub_dynamic.errors import UBAlignmentError, UBShapeError, UBUnsupportedError
from ub_dynamic.manager import Manager

NONE, FP8 = fakes.MODES.NONE, fakes.MODES.FP8
RING, PIPELINE, BULK = ({"method": method} for method in ("ring_exchange", "pipeline", "bulk"))


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_engine.pytorch.utils.get_device_compute_capability", lambda: (9, 0))


@pytest.mark.parametrize(
    ("modes", "ub_cfgs"),
    [
        ([NONE, FP8], None),
        ([FP8], {"qkv_dgrad": PIPELINE}),
        ([FP8], {"qkv_dgrad": {**PIPELINE, "fp8_buf": True}, "fc1_fprop": {"fp8_buf": False}}),
        ([FP8], {"proj_fprop": {"fp8_buf": True}, "fc2_fprop": {**RING, "fp8_buf": True}}),
        ([FP8], {"qkv_dgrad": {**RING, "fp8_buf": True}, "fc1_wgrad": {"fp8_buf": True}}),
        ([NONE, FP8], [{"qkv_dgrad": RING}, None]),
        ([FP8, NONE], [{"qkv_dgrad": RING}, {"qkv_dgrad": {"num_sm": 2}, "proj_fprop": RING}]),
        ([FP8, NONE], [None, {"qkv_dgrad": RING}]),
        ([NONE, FP8], [{"qkv_dgrad": RING}, {"fc1_dgrad": {**PIPELINE, "fp8_buf": True}}]),
        ([FP8, NONE], [{"fc1_dgrad": PIPELINE}, {"fc1_dgrad": BULK, "fc1_wgrad": {"num_sm": 2}}]),
        ([NONE, FP8], [{"fc1_dgrad": RING}, {"fc1_wgrad": {"num_sm": 2}}]),
    ],
)
def test_a_mode_has_what_te_makes(modes: list[Any], ub_cfgs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {}
    for mode in resolve_modes((CAPACITY, HIDDEN), TP, torch.bfloat16, ub_cfgs, modes):
        for spec in mode.specs:
            if spec.method != "external":
                name = communicator_name((spec.name, mode.value))
                expected[name] = (spec.method, spec.collective, spec.dtype, spec.use_ce)
    with policy_te.te_world(monkeypatch, None, ub_cfgs, quantization_modes=modes) as world:
        specs = {name: spec for name, spec in world.backend.specs.items() if name in expected}
        found = {name: (spec.method, spec.collective, spec.dtype, spec.use_ce) for name, spec in specs.items()}
        assert len(world.backend.communicators) == len(modes) * len(LAYERS)
    assert found == expected


@pytest.mark.parametrize(
    ("modes", "ub_cfgs", "text"),
    [
        ([NONE, FP8], {"qkv_dgrad": RING}, "qkv_dgrad: .* method 'ring_exchange' in one quantization mode only"),
        ([FP8, NONE], [{"fc1_dgrad": PIPELINE}, None], "fc1_dgrad with a pipelined reduce-scatter"),
        ([NONE, FP8], [{"fc1_dgrad": RING}, {"fc1_dgrad": BULK}], "fc1_dgrad: .* in BF16, .* give mode FP8 first"),
    ],
)
def test_what_the_modes_before_leave_in_tes_tables_is_refused(
    modes: list[Any], ub_cfgs: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = pytest.raises(UBUnsupportedError, match=text)
    with refused, policy_te.te_world(monkeypatch, None, ub_cfgs, quantization_modes=modes):
        pass
    assert policy_te.made == []


class TestCublasMp:
    """Its communicators have no buffer, so no rule of UserBuffers is for them."""

    @pytest.fixture(autouse=True)
    def _with_cublasmp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if "with_cublasmp" not in inspect.signature(base.initialize_ub).parameters:
            pytest.skip("cuBLASMp came with Transformer Engine 2.17")
        for kind in (fakes.Base, fakes.Ring):
            monkeypatch.setattr(kind, "with_cublasmp", lambda self: True, raising=False)

    @pytest.mark.parametrize(
        ("modes", "ub_cfgs"),
        [
            ([NONE, FP8], None),
            ([NONE], {"fc1_dgrad": PIPELINE, "qkv_wgrad": {"num_sm": 64}, "proj_fprop": {"num_sm": 64}}),
            ([FP8, NONE], [{"fc1_dgrad": {**PIPELINE, "fp8_buf": True}}, {"qkv_wgrad": BULK}]),
        ],
    )
    def test_ranks_share_t_evenly_and_that_is_all(
        self, modes: list[Any], ub_cfgs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        shape = (34, 9)  # odd rows of odd size, which no kernel of UserBuffers takes
        resolved = resolve_modes(shape, TP, torch.bfloat16, ub_cfgs, modes, with_cublasmp=True)
        expected = [communicator_name((spec.name, mode.value)) for mode in resolved for spec in mode.specs]
        world = policy_te.te_world(
            monkeypatch, None, ub_cfgs, quantization_modes=modes, capacity=shape, with_cublasmp=True
        )
        with caplog.at_level(logging.INFO, "ub_dynamic"), world as made:
            backend = made.backend
            assert sorted(comm.name for comm in backend.communicators) == sorted(expected)
            assert backend.capacity_only is None and backend.tp == TP and not backend.specs
            manager = Manager(backend, shape, check="never", guard=False)
            assert (manager.token_multiple(), manager.max_tokens(), manager.round_up_tokens(3)) == (2, 34, 4)
            with pytest.raises(UBAlignmentError, match="T = 3 is not a multiple of tp = 2; the next valid T is 4"):
                manager.set_active_shape([3, 9])
            assert set(manager.set_active_shape([4, 9]).skipped) == set(expected)
            assert manager.buffer_active_shape("qkv_fprop" if NONE in modes else "qkv_fprop/fp8") == shape
            with pytest.raises(
                UBUnsupportedError, match="proj_fprop has no active shape, .*takes the size .* operands"
            ):
                manager.set_buffer_active_shape("proj_fprop", [4, 9])
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert caplog.text.count("take T from their operands: ") == 1 and "stay at capacity" not in caplog.text

    @pytest.mark.parametrize(
        ("ub_cfgs", "kind", "text"),
        [
            ({"qkv_dgrad": BULK}, UBUnsupportedError, "qkv_dgrad: cuBLASMp has no method 'bulk'"),
            ({"qkv_dgrad": RING, "qkv_wgrad": {}}, UBShapeError, "qkv_wgrad must not be configured"),
            ([None, {"qkv_dgrad": RING}], UBUnsupportedError, "in one quantization mode only"),
        ],
    )
    def test_what_te_refuses_while_it_registers(
        self, ub_cfgs: Any, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changes = {"quantization_modes": [NONE, FP8], "with_cublasmp": True}
        with pytest.raises(kind, match=text), policy_te.te_world(monkeypatch, None, ub_cfgs, **changes):
            pass
        assert policy_te.made == []
        with policy_te.stock(monkeypatch), pytest.raises(ValueError):  # each in its own words
            base.initialize_ub([CAPACITY, HIDDEN], TP, ub_cfgs=ub_cfgs, bootstrap_backend="gloo", **changes)

    def test_a_capacity_that_tp_does_not_divide(self) -> None:
        with pytest.raises(UBAlignmentError, match=r"capacity \[33, 9\]: T = 33 .* tp = 2; the next valid T is 34"):
            resolve_modes((33, 9), 2, torch.bfloat16, with_cublasmp=True)

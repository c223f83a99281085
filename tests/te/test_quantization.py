# SPDX-License-Identifier: Apache-2.0
"""What initialize_ub makes in each quantization mode, against TE's own code."""

from __future__ import annotations

from typing import Any

import fakes
import policy_te
import pytest
import torch
from cpu_te import CAPACITY, HIDDEN, TP

from ub_dynamic.backends.names import LAYERS
from ub_dynamic.backends.quantization import resolve_modes
from ub_dynamic.backends.te.communicators import communicator_name
from ub_dynamic.errors import UBUnsupportedError

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
        ([FP8, NONE], [{"fc1_dgrad": PIPELINE}, {"fc1_dgrad": BULK}]),
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

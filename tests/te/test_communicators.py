# SPDX-License-Identifier: Apache-2.0
"""Which communicator is what: read from the objects, in agreement with TE's defaults and configurations."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from typing import Any

import fakes
import pytest
import torch

from ub_dynamic.backends.names import LAYERS, resolve_specs
from ub_dynamic.backends.te import native
from ub_dynamic.backends.te.communicators import CUBLASMP, Communicator, communicator_name, read_communicators
from ub_dynamic.errors import UBCapacityError

CAPACITY = (4096, 512)


def read(
    table: dict[Any, Any], capacity: tuple[int, int] = CAPACITY, tp: int = 2, pipelined: Sequence[str] = ()
) -> dict[str, Communicator]:
    return {comm.name: comm for comm in read_communicators(table, capacity, tp, native.load(), "", pipelined)}


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize(
    "methods",
    [
        {},
        {"proj_fprop": "ring_exchange", "fc2_fprop": "ring_exchange"},
        {"qkv_dgrad": "ring_exchange"},
    ],
)
def test_objects_agree_with_the_configuration(tp: int, methods: dict[str, str]) -> None:
    found = read(fakes.table(CAPACITY, tp, **methods), tp=tp)
    cfgs = {name: {"method": method} for name, method in methods.items()}
    expected = {spec.name: spec for spec in resolve_specs(CAPACITY, tp, torch.bfloat16, cfgs)}
    assert set(found) - set(expected) == ({"qkv_wgrad"} if "qkv_dgrad" in methods else set())  # made for no use
    for name, spec in expected.items():
        if spec.method == "external":
            assert found[name].spec is None
        else:
            assert found[name].spec == spec


def test_fp8_buffers_carry_their_mode_and_dtype() -> None:
    found = read(fakes.table(CAPACITY, 2, modes=("none", "fp8")))
    assert len(found) == 2 * len(LAYERS)
    for name in ("qkv_fprop", "qkv_dgrad", "proj_dgrad", "fc1_fprop", "fc2_dgrad"):
        assert found[f"{name}/fp8"].spec.dtype == torch.uint8
        assert found[name].spec.dtype == torch.bfloat16
    for name in ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad"):
        assert found[f"{name}/fp8"].spec.dtype == torch.bfloat16  # reduce-scatters stay in high precision
    assert found["proj_wgrad/fp8"].fixed


def test_names() -> None:
    assert communicator_name(("qkv_fprop", fakes.MODES.NONE)) == "qkv_fprop"
    assert communicator_name(("qkv_fprop", fakes.MODES.FP8)) == "qkv_fprop/fp8"


def use(comm: Communicator) -> tuple[str, str]:
    assert comm.spec is not None, comm.skipped
    return comm.spec.method, comm.spec.collective


def test_the_configuration_tells_which_dgrads_are_pipelined() -> None:
    table = fakes.table(CAPACITY, 2, modes=("none", "fp8"))
    found = read(table, pipelined=["qkv_dgrad/fp8", "fc1_dgrad"])
    assert use(found["qkv_dgrad"]) == use(found["fc1_dgrad/fp8"]) == ("bulk", "ag")
    assert use(found["qkv_dgrad/fp8"]) == use(found["fc1_dgrad"]) == ("pipeline", "rs")
    assert found["qkv_dgrad/fp8"].spec.dtype == torch.uint8  # with fp8_buf: the dtype does not tell


def one(layer: str, comm: Any, capacity: tuple[int, int] = CAPACITY) -> Communicator:
    return read({(layer, fakes.MODES.NONE): comm}, capacity)[layer]


@pytest.mark.parametrize(
    ("layer", "ring", "options", "capacity", "reason"),
    [
        ("proj_wgrad", False, {}, CAPACITY, "MXFP8 only"),
        ("qkv_dgrad", False, {"dtype": torch.float32}, CAPACITY, "float32"),
        ("proj_fprop", False, {"dtype": torch.uint8, "num_splits": 4}, (64, 96), r"16 \* num_splits = 64"),
        ("proj_fprop", False, {"num_splits": 3}, CAPACITY, r"8 \* num_splits = 24"),
        ("qkv_dgrad", False, {"tp": 6}, (4098, 512), "tp = 6"),
    ],
)
def test_why_one_stays_at_capacity(
    layer: str, ring: bool, options: dict[str, Any], capacity: tuple[int, int], reason: str
) -> None:
    table = {(layer, fakes.MODES.NONE): fakes.communicator(ring, capacity, **options)}
    if layer == "qkv_dgrad":
        table["qkv_wgrad", fakes.MODES.NONE] = fakes.communicator(False, capacity, options.get("tp", 2))
    comm = read(table, capacity, options.get("tp", 2))[layer]
    assert comm.spec is None
    assert comm.fixed
    assert re.search(reason, comm.skipped), comm.skipped


def test_atomic_gemm_stays_at_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = fakes.communicator(True, CAPACITY)
    module = native.load()

    class Atomic:
        @staticmethod
        def inspect(communicator: Any) -> dict[str, Any]:
            return {**module.inspect(communicator), "atomic_gemm": True}

    (found,) = read_communicators({("qkv_fprop", fakes.MODES.NONE): comm}, CAPACITY, 2, Atomic, "")  # type: ignore[arg-type]
    assert "atomic" in str(found.skipped)


def test_cublasmp_follows_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = fakes.communicator(True, CAPACITY)
    monkeypatch.setattr(fakes.Ring, "with_cublasmp", lambda self: True, raising=False)
    found = one("qkv_fprop", comm)
    assert found.skipped == CUBLASMP
    assert not found.fixed


def test_without_the_native_file_all_stay_and_say_why() -> None:
    table = fakes.table(CAPACITY, 2)
    found = read_communicators(table, CAPACITY, 2, None, "no compiler")
    assert {comm.skipped for comm in found} == {"no compiler"}
    assert all(comm.fixed and comm.tp == 2 for comm in found)


def test_tes_silent_lack_of_regions_is_found() -> None:
    with pytest.raises(UBCapacityError, match="at most 31 buffers"):
        one("qkv_fprop", fakes.communicator(True, CAPACITY, region=-1))


def test_communicators_are_held_weakly() -> None:
    comm = fakes.communicator(True, CAPACITY)
    found = one("qkv_fprop", comm)
    assert not [holder for holder in gc.get_referrers(comm) if holder is found or holder is vars(found)]
    assert found.reference() is comm

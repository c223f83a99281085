# SPDX-License-Identifier: Apache-2.0
"""The guard by itself: what it wraps, what it refuses, and what it tells."""

from __future__ import annotations

import inspect
from typing import Any

import cpu_te
import fakes
import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.graph as graph
import transformer_engine.pytorch.module._common as common
import transformer_engine.pytorch.utils as utils
import transformer_engine_torch as tex
from cpu_te import CAPACITY, HIDDEN, TP, comm, rows, te_world, weight
from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.ops.fused.userbuffers_backward_linear import UserbuffersBackwardLinear

from ub_dynamic.backends.te import guard as guard_module
from ub_dynamic.backends.te.guard import Guard
from ub_dynamic.errors import UBAlignmentError, UBShapeError, UBUnsupportedError

AG, RS = tex.CommOverlapType.AG, tex.CommOverlapType.RS


# -- what TE offers to be wrapped ------------------------------------------------------------------------------


def test_positions_of_generic_gemm() -> None:
    text = tex.generic_gemm.__doc__.split("\n")[0]
    names = [part.split(":")[0].strip() for part in text[text.index("(") + 1 :].split(", ") if ":" in part]
    assert names[:4] == ["A", "transA", "B", "transB"]
    assert names[4] == "D"
    positions = (guard_module._COMM, guard_module._COMM_TYPE, guard_module._EXTRA, guard_module._BULK)
    assert [names[i] for i in positions] == ["comm_overlap", "comm_type", "extra_output", "bulk_overlap"]


def test_te_passes_them_by_keyword_and_calls_by_attribute() -> None:
    source = inspect.getsource(general_gemm)
    assert "tex.generic_gemm(*args, **kwargs)" in source
    for name in ("comm_overlap", "comm_type", "extra_output", "bulk_overlap"):
        assert f'"{name}":' in source


@pytest.mark.parametrize("kind", [tex.CommOverlap, tex.CommOverlapP2P])
def test_signatures_of_the_communicators(kind: Any) -> None:
    assert "(self: " in kind.copy_into_buffer.__doc__
    assert "input: torch.Tensor, local_chunk: bool = False) -> None" in kind.copy_into_buffer.__doc__
    assert "local_chunk: bool = False, shape: " in kind.get_buffer.__doc__


def test_modules_have_what_the_hazards_read() -> None:
    for module in (Linear, LayerNormLinear):
        assert list(inspect.signature(module.forward).parameters)[:2] == ["self", "inp"]
        source = inspect.getsource(module.__init__)
        for attribute in ("self.ub_bulk_wgrad", "self.ub_name", "self.weight_names"):
            assert attribute in source
        if module is Linear:
            assert "self.ub_bulk_dgrad" in source and "self.ub_overlap_ag_dgrad" in source
    assert list(inspect.signature(common.WeightGradStore.put).parameters) == ["self", "tensor_list", "func"]
    assert callable(graph.is_graph_capturing)


OWNERS = (
    tex, tex.CommOverlap, tex.CommOverlapP2P, torch.cuda.CUDAGraph, Linear, LayerNormLinear, LayerNormMLP,
    UserbuffersBackwardLinear, common.WeightGradStore, graph, te,
)  # fmt: skip


def test_no_trace_on_the_real_classes() -> None:
    before = {owner: dict(vars(owner)) for owner in OWNERS}
    guard = Guard((), (CAPACITY, HIDDEN))
    for _ in range(2):
        guard.install(lambda name, tokens: None)
        changed = {owner: dict(vars(owner)) for owner in OWNERS}
        assert all(changed[owner] != before[owner] for owner in OWNERS)
        guard.remove()
        assert {owner: dict(vars(owner)) for owner in OWNERS} == before
    guard.remove()


def test_a_te_without_a_way_in_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tex, "generic_gemm")
    before = {owner: dict(vars(owner)) for owner in OWNERS}
    with pytest.raises(UBUnsupportedError, match="generic_gemm"):
        Guard((), (CAPACITY, HIDDEN)).install(lambda name, tokens: None)
    assert {owner: dict(vars(owner)) for owner in OWNERS} == before


# -- what it refuses -------------------------------------------------------------------------------------------


def test_a_reduce_scatter_with_other_features_than_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        with pytest.raises(UBShapeError, match=r"128 output features.* H = 64"):
            general_gemm(
                weight(128), rows(CAPACITY), ub=comm("proj_fprop"), ub_type=RS, extra_output=rows(CAPACITY // TP, 128)
            )
        assert world.calls == []


def test_a_reduce_scatter_output_of_a_first_dimension_that_does_not_divide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with te_world(monkeypatch) as world:
        world.manager.set_active_shape([6, HIDDEN])
        x = torch.zeros(3, 2, HIDDEN, dtype=torch.bfloat16)  # [S, B, H] with S % tp: TE floors S / tp
        with pytest.raises(UBShapeError, match="dim 0 of the layer's input must be a multiple of tp = 2"):
            general_gemm(weight(), x, ub=comm("fc2_fprop"), ub_type=RS, extra_output=torch.zeros(1, 2, HIDDEN))
        assert world.calls == []


def test_positional_arguments_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        world.manager.set_active_shape([64, HIDDEN])
        front = (weight(), True, rows(128), False, None, *[None] * 11)
        with pytest.raises(UBShapeError, match="128 tokens"):
            tex.generic_gemm(*front, comm("qkv_fprop"), AG, None, False)
        with pytest.raises(UBShapeError, match="128 tokens"):
            tex.generic_gemm(A=weight(), transA=True, B=rows(128), transB=False, comm_overlap=comm("qkv_fprop"))
        assert world.calls == []


def test_a_bulk_communicator_as_a_pipeline_needs_the_rule_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_te, "HIDDEN", 48)  # no multiple of 8 * num_splits = 32
    with te_world(monkeypatch, proj_fprop="ring_exchange", fc2_fprop="ring_exchange") as world:
        with pytest.raises(UBAlignmentError, match=r"qkv_wgrad as a pipeline.*8 \* num_splits = 32"):
            general_gemm(
                weight(48), rows(CAPACITY), ub=comm("qkv_wgrad"), ub_type=RS, extra_output=rows(CAPACITY // TP, 48)
            )
        assert world.calls == []


@pytest.mark.parametrize("method", ["pipeline", "bulk"])  # a frozen weight uses the bulk communicator for it
def test_a_pipelined_dgrad_of_transposed_weights_passes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as TE has them in FP8 before compute capability 10.0; those that are not are refused in test_ops
    monkeypatch.setattr(utils, "get_device_compute_capability", lambda: (9, 0))
    with te_world(monkeypatch, modes=("none", "fp8"), qkv_dgrad=method) as world:
        world.manager.set_active_shape([64, HIDDEN])
        general_gemm(weight(), rows(64), ub=comm("qkv_dgrad", "fp8"), ub_type=RS, extra_output=rows(64 // TP))
        assert [call.name for call in world.overlaps()] == ["qkv_dgrad"]


def test_a_copy_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        world.backend.connect(None)
        copied: list[int] = []
        for kind in (fakes.Base, fakes.Ring):
            monkeypatch.setattr(kind, "copy_into_buffer", lambda self, x, local_chunk: copied.append(len(x)))
        world.backend.connect(world.manager._on_operand)
        world.manager.set_active_shape([64, HIDDEN])
        for name in ("qkv_fprop", "qkv_dgrad"):
            with pytest.raises(UBShapeError, match=f"{name}: the microbatch has 128 tokens"):
                comm(name).copy_into_buffer(rows(128 // TP), local_chunk=True)
            with pytest.raises(UBShapeError, match=f"{name}: the microbatch has 32 tokens"):
                comm(name).copy_into_buffer(rows(32))
            assert not copied
            comm(name).copy_into_buffer(rows(64 // TP), local_chunk=True)
            assert [copied.pop()] == [64 // TP]


def test_partial_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch), pytest.raises(UBShapeError, match="33 elements are no whole rows of H = 64"):
        comm("qkv_fprop").copy_into_buffer(torch.zeros(33, dtype=torch.bfloat16), local_chunk=True)


def test_communicators_at_capacity_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        world.manager.set_active_shape([64, HIDDEN])
        with pytest.raises(UBShapeError, match="proj_wgrad.*64 tokens.*capacity of 256 tokens.*MXFP8 only"):
            comm("proj_wgrad").copy_into_buffer(rows(64 // TP), local_chunk=True)
        comm("proj_wgrad").copy_into_buffer(rows(CAPACITY // TP), local_chunk=True)


def test_mxfp8_works_at_capacity_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class MXFP8TensorStorage:
        def __init__(self, tokens: int) -> None:
            self._tokens = tokens

        def size(self) -> torch.Size:
            return torch.Size((self._tokens, HIDDEN))

    with te_world(monkeypatch, modes=("fp8",)) as world:
        recorded: list[Any] = []
        world.backend.connect(None)
        monkeypatch.setattr(tex, "generic_gemm", lambda *args, **kwargs: recorded.append(args))
        world.backend.connect(world.manager._on_operand)
        arguments = {"comm_overlap": comm("qkv_fprop", "fp8"), "comm_type": AG}
        world.manager.set_active_shape([128, HIDDEN])
        with pytest.raises(UBUnsupportedError, match="MXFP8 overlap works at the capacity of 256 tokens only, got 128"):
            tex.generic_gemm(weight(), True, MXFP8TensorStorage(128), False, **arguments)
        assert not recorded
        world.manager.reset_active_shape()
        tex.generic_gemm(weight(), True, MXFP8TensorStorage(CAPACITY), False, **arguments)
        assert len(recorded) == 1


def test_communicators_of_others_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        other = fakes.communicator(False, (32, 16), 2)
        other.copy_into_buffer(torch.ones(16, 16, dtype=torch.bfloat16), local_chunk=True)
        assert other.get_buffer(shape=[32, 16]).sum() == 256
        assert world.backend.find(other) is None
        assert world.backend.busy() is None


def test_guard_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch, guard=False) as world:
        assert tex.generic_gemm.__qualname__.startswith("_recorded_gemm")
        world.manager.set_active_shape([64, HIDDEN])
        general_gemm(weight(), rows(128), ub=comm("qkv_fprop"), ub_type=AG)  # as in stock TE
        assert world.calls[0].tokens != world.calls[0].active


# -- what it tells -----------------------------------------------------------------------------------------------


def test_overlaps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with te_world(monkeypatch) as world:
        module = cpu_te.layer("linear", "qkv", ub_overlap_ag=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True)
        for _ in range(2):
            module(cpu_te.operand(module, CAPACITY)).sum().backward()
        found = {row["name"]: row for row in world.backend.doctor_report()["communicators"]}
        assert found["qkv_fprop"]["overlaps"] == {"all-gather + GEMM": 2}
        assert found["qkv_dgrad"]["overlaps"] == {"bulk all-gather": 2}
        assert found["qkv_wgrad"]["overlaps"] == {"bulk reduce-scatter": 2}
        assert found["proj_fprop"]["overlaps"] == {}
        assert found["proj_wgrad"]["dynamic"] is False
        assert "MXFP8" in found["proj_wgrad"]["reason"]


def test_nvtx_ranges_follow_tes_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda text: ranges.append(text))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("pop"))
    monkeypatch.setenv("NVTE_NVTX_ENABLED", "1")
    with te_world(monkeypatch) as world:
        world.manager.set_active_shape([64, HIDDEN])
        general_gemm(weight(), rows(64), ub=comm("qkv_fprop"), ub_type=AG)
    assert ranges == ["ub_dynamic.set_active_shape T=64", "pop", "ub_dynamic.overlap qkv_fprop", "pop"]

# SPDX-License-Identifier: Apache-2.0
"""Megatron's TransformerBlock of TE's real modules around real communicator objects: T, the pad flag, refusals."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import cpu_te
import megatron_cpu
import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from torch.testing._internal.distributed.fake_pg import FakeStore

from ub_dynamic import PackedBatch, UBCapacityError, UBShapeError, UBUnsupportedError, api
from ub_dynamic.integrations import megatron
from ub_dynamic.integrations.megatron import adapter

pytestmark = pytest.mark.te

TP, CAPACITY, HIDDEN = cpu_te.TP, cpu_te.CAPACITY, cpu_te.HIDDEN


class Place:
    """A block of two layers on rank 0 of two, what reached the library, and the flags that attention got."""

    def __init__(self, world: cpu_te.World, config: Any, flags: list[Any]) -> None:
        self.world, self.config, self.flags = world, config, flags
        spec = get_gpt_layer_with_transformer_engine_spec()
        self.block = TransformerBlock(config, TransformerBlockSubmodules([spec] * 2), post_layer_norm=False)

    def forward(self, tokens: int, params: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = torch.randn(tokens // TP, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        return leaf, self.block(leaf, None, packed_seq_params=packed([tokens]) if params is None else params)


@pytest.fixture
def flags() -> list[Any]:
    return []


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, flags: list[Any]) -> Iterator[Place]:
    attend = te.DotProductAttention.forward

    @functools.wraps(attend)
    def forward(self: Any, query: torch.Tensor, key: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        flags.append(kwargs.get("pad_between_seqs"))
        return (query + key + value).flatten(-2)

    with megatron_cpu.on_host(), cpu_te.te_world(monkeypatch) as world:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
        parallel_state.initialize_model_parallel(TP, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
        monkeypatch.setattr(te.DotProductAttention, "forward", forward)
        monkeypatch.setattr(api, "_manager", world.manager)
        config = megatron_cpu.config(
            num_layers=2,
            hidden_size=HIDDEN,
            tensor_model_parallel_size=TP,
            sequence_parallel=True,
            params_dtype=torch.bfloat16,
            bf16=True,
            add_bias_linear=False,
        )
        try:
            yield Place(world, config, flags)
        finally:
            megatron.uninstall()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def packed(lengths: list[int], padded: list[int] | None = None) -> PackedSeqParams:
    """Boundaries as Megatron's data code makes them: four tensors of their own, and no flag."""
    real, rows = (torch.tensor([0, *each]).cumsum(0).int() for each in (lengths, padded or lengths))
    return PackedSeqParams(
        "thd", real, real.clone(), rows, rows.clone(), max(padded or lengths), max(padded or lengths)
    )


def test_stock_raises_at_another_t(place: Place) -> None:
    with pytest.raises(UBShapeError, match=r"128 tokens, the active shape is 256 tokens"):
        place.forward(128)


def wrapped(function: Any) -> Any:
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


def test_after_uninstall_what_others_kept_of_it_sets_no_shape(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron.install()
    monkeypatch.setattr(TransformerBlock, "forward", wrapped(TransformerBlock.forward))
    megatron.uninstall()
    with pytest.raises(UBShapeError, match=r"128 tokens, the active shape is 256 tokens"):
        place.forward(128)
    megatron.install()
    place.forward(128)
    assert place.world.manager.active[0] == 128


def test_the_forward_and_every_backward_see_their_own_t(place: Place) -> None:
    megatron.install()
    waiting = [place.forward(tokens) for tokens in (128, 256, 32)]
    calls = place.world.overlaps()
    assert [call.tokens for call in calls] == [128] * 8 + [256] * 8 + [32] * 8  # qkv, proj, fc1, fc2 of two layers
    assert all(call.tokens == call.active for call in calls)
    assert {call.name for call in calls} == {"qkv_fprop", "proj_fprop", "fc1_fprop", "fc2_fprop"}
    for (leaf, output), tokens in zip(waiting, (128, 256, 32), strict=True):
        calls.clear()
        before = len(place.world.calls)
        output.backward(torch.ones_like(output))
        back = [call for call in place.world.calls[before:] if call.name is not None]
        assert {call.tokens for call in back} == {tokens}
        assert all(call.tokens == call.active for call in back)
        assert {"fc2_dgrad", "fc1_dgrad", "proj_dgrad", "qkv_dgrad"} <= {call.name for call in back}
        assert leaf.grad is not None
    assert place.world.manager.shape_changes >= 5


class Behind(torch.autograd.Function):
    """What follows the last block in a microbatch, such as the prediction of further tokens."""

    seen: list[int]

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, manager: Any) -> torch.Tensor:
        ctx.manager = manager
        return inp.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Behind.seen.append(ctx.manager.active[0])
        return grad.expand(32, 1, HIDDEN).bfloat16(), None


def test_what_lies_behind_the_last_block_sees_the_same_t(place: Place) -> None:
    megatron.install()
    Behind.seen = []
    step = adapter.adapter().wrap_forward_step(lambda: ([Behind.apply(place.forward(64)[1], place.world.manager)], 7))
    ([loss], count) = step()
    assert count == 7
    place.forward(128)
    loss.backward()
    assert Behind.seen == [64]


def test_a_step_without_a_block_binds_nothing(place: Place) -> None:
    megatron.install()
    place.forward(64)
    step = adapter.adapter().wrap_forward_step(lambda: (None, 0))
    assert step() == (None, 0)


def test_a_later_stage_reads_what_it_received(place: Place) -> None:
    megatron.install()
    place.block.pre_process = False
    place.block.set_input_tensor(torch.randn(64 // TP, 1, HIDDEN, dtype=torch.bfloat16))
    place.block(None, None, packed_seq_params=packed([64]))
    assert place.world.manager.active == (64, HIDDEN)
    place.block.set_input_tensor(torch.randn(64, HIDDEN))
    with pytest.raises(UBUnsupportedError, match=r"shape \[64, 64\] where Megatron has hidden states"):
        place.block(None, None)


def test_the_batch_dimension_counts(place: Place) -> None:
    megatron.install()
    place.block(torch.randn(32 // TP, 2, HIDDEN, dtype=torch.bfloat16), None)
    assert place.world.manager.active == (64, HIDDEN)


def test_a_t_that_cannot_be_is_refused_before_anything_runs(place: Place) -> None:
    megatron.install()
    place.forward(64)
    before = len(place.world.calls)
    with pytest.raises(UBCapacityError, match="264"):
        place.forward(264)
    assert len(place.world.calls) == before
    assert place.world.manager.active == (64, HIDDEN)


def test_a_block_without_overlap_is_left_alone(place: Place) -> None:
    megatron.install()
    place.config.tp_comm_overlap = False
    without = Place(place.world, place.config, place.flags)
    without.forward(64)
    assert not place.world.overlaps()
    assert place.world.manager.active == (CAPACITY, HIDDEN)


def test_a_block_that_overlaps_though_its_configuration_says_no_longer(place: Place) -> None:
    megatron.install()
    names = {"tp_comm_buffer_name": "q_down_proj", "parallel_mode": "duplicated", "bias": False}
    skipped = {"skip_bias_add": False, "skip_weight_param_allocation": False}
    with pytest.warns(UserWarning, match="q_down_proj is not supported"):
        TELinear(HIDDEN, HIDDEN, config=place.config, init_method=place.config.init_method, **names, **skipped)
    assert not place.config.tp_comm_overlap  # Megatron switched it off for all that is built from now on
    _, output = place.forward(64)
    place.forward(128)
    before = len(place.world.calls)
    output.sum().backward()
    assert {call.active for call in place.world.calls[before:] if call.name is not None} == {64}
    place.config.delay_wgrad_compute = True
    with pytest.raises(UBUnsupportedError, match="delay_wgrad_compute = True"):
        place.forward(64)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("overlap_moe_expert_parallel_comm", True, "in turns on several streams"),
        ("delay_wgrad_compute", True, "after the backward of their microbatch"),
        ("cuda_graph_impl", "local", "one graph a T"),
    ],
)
def test_refused_at_first_use(place: Place, setting: str, value: Any, reason: str) -> None:
    megatron.install()
    setattr(place.block.config, setting, value)
    with pytest.raises(UBUnsupportedError, match=reason) as raised:
        place.forward(64)
    assert f"{setting} = {value!r}" in str(raised.value)
    assert not place.world.calls


@pytest.mark.parametrize(("lengths", "padded", "flag"), [([60, 64], [64, 64], True), ([64, 64], [64, 64], False)])
def test_attention_gets_the_flag_of_distinct_tensors(
    place: Place, lengths: list[int], padded: list[int], flag: bool
) -> None:
    """Distinct equal tensors take TE's slow path, unless the host knows better."""
    megatron.install(pad_policy="sync_once")
    place.forward(128, packed(lengths, padded))
    assert place.flags == [flag, flag]


def test_a_packed_batch_brings_its_flag(place: Place) -> None:
    megatron.install(pad_policy="error")
    batch = PackedBatch.from_lengths([60, 64], tp=TP, align=64)
    place.forward(batch.total_tokens, batch.to_megatron("cpu"))
    assert place.flags == [batch.pad_between_seqs] * 2


def test_full_recomputation(place: Place) -> None:
    for name, value in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1)):
        setattr(place.config, f"recompute_{name}", value)
    megatron.install()
    waiting = [place.forward(tokens) for tokens in (128, 32)]
    for (_, output), tokens in zip(waiting, (128, 32), strict=True):
        before = len(place.world.calls)
        output.backward(torch.ones_like(output))
        back = [call for call in place.world.calls[before:] if call.name is not None]
        assert {(call.tokens, call.active) for call in back} == {(tokens, tokens)}
        assert "fc2_fprop" in {call.name for call in back}

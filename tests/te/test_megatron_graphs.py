# SPDX-License-Identifier: Apache-2.0
"""Megatron's decoder through GraphedMicrobatches: which graph serves which microbatch; the capture itself needs a GPU.

TE's ``make_graphed_callables`` is replaced by a call of the module with the sample buffers' values copied in, as a
replay does it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from megatron.core.tensor_parallel import random
from test_megatron_block import Place, flags, packed, place  # noqa: F401  # fixtures

from ub_dynamic import PackedBatch, UBStateError, UBUnsupportedError
from ub_dynamic.integrations import megatron

pytestmark = pytest.mark.te


class Capture:
    """A stand-in for a captured module: tensors are copied into its samples, everything else was fixed before."""

    made: list[Capture]

    def __init__(self, module: torch.nn.Module, samples: Any, sample_kwargs: Any) -> None:
        self.module, self.samples, self.kwargs, self.calls = module, samples, sample_kwargs, 0

    def __call__(self, *tensors: torch.Tensor, **more: torch.Tensor) -> Any:
        assert [t.shape for t in tensors] == [t.shape for t in self.samples]
        assert {n: t.shape for n, t in more.items()} == {n: t.shape for n, t in self.kwargs.items()}
        self.calls += 1
        return self.module(*tensors, **more)

    def reset(self) -> None:
        self.samples = ()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Capture]:
    made: list[Capture] = []

    def capture(
        module: Any,
        samples: Any,
        *,
        sample_kwargs: Any,
        num_warmup_iters: int,
        clone_param_grads_on_return: bool = True,
    ) -> Capture:
        made.append(Capture(module, samples, sample_kwargs))
        return made[-1]

    monkeypatch.setattr(te, "make_graphed_callables", capture)
    monkeypatch.setattr(random, "get_cuda_rng_tracker", lambda: te.distributed.CudaRNGStatesTracker())
    return made


def test_one_graph_a_shape(place: Place, captures: list[Capture]) -> None:  # noqa: F811
    megatron.install()
    graphed = megatron.graph_decoder(place.block, in_flight=2)
    waiting = [(tokens, place.forward(tokens)[1]) for tokens in (128, 32, 128, 64, 32)]
    assert graphed.captures == 3 + 2  # two microbatches of 128 and two of 32 are in flight at once
    for tokens, output in waiting:
        assert output.shape == (tokens // 2, 1, 64)
        before = len(place.world.calls)
        output.backward(torch.ones_like(output))
        back = [call for call in place.world.calls[before:] if call.name is not None]
        assert {(call.tokens, call.active) for call in back} == {(tokens, tokens)}
    place.forward(128)[1].backward(torch.ones(64, 1, 64, dtype=torch.bfloat16))
    assert graphed.captures == 5
    graphed.remove()
    assert "forward" not in vars(place.block)
    place.forward(64)
    assert graphed.captures == 5


def test_the_adapter_takes_its_graphs_along(place: Place, captures: list[Capture]) -> None:  # noqa: F811
    megatron.install()
    graphed = megatron.graph_decoder(place.block)
    place.forward(128)[1].backward(torch.ones(64, 1, 64, dtype=torch.bfloat16))
    assert len(graphed.graphs[0]) == 1
    with pytest.raises(UBStateError, match=r"call its remove\(\), or uninstall\(\), first"):
        megatron.install(check="strict")
    assert len(graphed.graphs[0]) == 1
    megatron.uninstall()
    assert len(graphed.graphs[0]) == 0
    assert "forward" not in vars(place.block)
    graphed.remove()
    megatron.install()
    place.forward(64)


def test_the_adapter_stays_while_a_graph_waits_for_its_backward(
    place: Place,  # noqa: F811
    captures: list[Capture],
) -> None:
    megatron.install()
    megatron.graph_decoder(place.block)
    _, output = place.forward(128)
    with pytest.raises(UBStateError, match="between its forward and its backward"):
        megatron.uninstall()
    assert megatron.is_installed()
    assert "forward" in vars(place.block)
    output.backward(torch.ones_like(output))
    megatron.uninstall()
    assert "forward" not in vars(place.block)


@pytest.mark.parametrize("decoders", [1, 2])
def test_of_several_blocks_all_stay_while_one_waits(place: Place, captures: list[Capture], decoders: int) -> None:  # noqa: F811
    megatron.install()
    blocks = [place.block, Place(place.world, place.config, place.flags).block]
    parts = [[block] for block in blocks] if decoders == 2 else [blocks]
    graphs = [graphed for part in parts for graphed in megatron.graph_decoder(part).graphs]
    place.forward(128)[1].backward(torch.ones(64, 1, 64, dtype=torch.bfloat16))
    place.block = blocks[1]
    _, output = place.forward(128)
    with pytest.raises(UBStateError, match="between its forward and its backward"):
        megatron.uninstall()
    assert [len(graphed) for graphed in graphs] == [1, 1]
    assert all("forward" in vars(block) for block in blocks)
    output.backward(torch.ones_like(output))
    megatron.uninstall()
    assert [len(graphed) for graphed in graphs] == [0, 0]
    assert not any("forward" in vars(block) for block in blocks)


def test_boundaries_are_inputs_and_facts_are_fixed(place: Place, captures: list[Capture]) -> None:  # noqa: F811
    megatron.install()
    graphed = megatron.graph_decoder(place.block)
    for lengths in ([60, 60], [100, 20], [30, 90]):  # of one graph
        batch = PackedBatch.from_lengths(lengths, tp=2, slots=4, max_seqlen=256, tail="ghost_padding", bucket=128)
        leaf = torch.randn(64, 1, 64, dtype=torch.bfloat16, requires_grad=True)
        place.block(leaf, None, packed_seq_params=batch.to_megatron("cpu")).sum().backward()
    assert graphed.captures == 1
    assert captures[0].calls == 3
    assert set(captures[0].kwargs) <= {"packed_cu_seqlens_q", "packed_cu_seqlens_q_padded"}  # shared tensors once


def test_more_microbatches_in_flight_than_graphs(place: Place, captures: list[Capture]) -> None:  # noqa: F811
    megatron.install()
    megatron.graph_decoder(place.block, in_flight=1)
    kept = place.forward(64)
    with pytest.raises(UBStateError, match="in_flight = 2 or more"):
        place.forward(64)
    del kept


def test_evaluation_runs_without_graphs(place: Place, captures: list[Capture]) -> None:  # noqa: F811
    megatron.install()
    megatron.graph_decoder(place.block)
    place.block.eval()
    place.forward(64)
    place.block.train()
    with torch.no_grad():
        place.forward(32)
    assert not captures
    assert place.world.manager.active == (32, 64)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("gradient_accumulation_fusion", True, "gradient_accumulation_fusion = True"),
        ("fp8", "hybrid", "graphs a shape are for BF16"),
        ("cuda_graph_impl", "local", "one graph a T"),
    ],
)
def test_what_a_graph_would_get_wrong(
    place: Place,  # noqa: F811
    captures: list[Capture],
    setting: str,
    value: Any,
    reason: str,
) -> None:
    megatron.install()
    setattr(place.config, setting, value)
    with pytest.raises(UBUnsupportedError, match=reason):
        megatron.graph_decoder(place.block)


def test_a_decoder_without_overlap(place: Place, captures: list[Capture]) -> None:  # noqa: F811
    megatron.install()
    place.config.tp_comm_overlap = False
    with pytest.raises(UBUnsupportedError, match="Megatron's own CUDA graphs"):
        megatron.graph_decoder(Place(place.world, place.config, place.flags).block)


def test_megatrons_random_states_are_refused(place: Place) -> None:  # noqa: F811
    megatron.install()
    with pytest.raises(UBUnsupportedError, match="te_rng_tracker=True"):
        megatron.graph_decoder(place.block)


def test_before_install(place: Place, captures: list[Capture]) -> None:  # noqa: F811
    with pytest.raises(UBStateError, match=r"call ub_dynamic.integrations.megatron.install\(\) first"):
        megatron.graph_decoder(place.block)
    with pytest.raises(UBUnsupportedError, match="no TransformerBlock"):
        megatron.graph_decoder(torch.nn.Linear(2, 2))

# SPDX-License-Identifier: Apache-2.0
"""megatron-core's TransformerBlock on dynamic UserBuffers: against no overlap, recomputation, and one graph a T."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from harness import case, expect, userbuffers

import ub_dynamic as ubd
from ub_dynamic.testing.te_layers import relative_error
from ub_dynamic.testing.te_world import World, poison

HIDDEN, CAPACITY = 512, 1024
LENGTHS = ([600, 424], [200, 56], [1000, 24], [512], [30, 34])
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Tensors = dict[str, torch.Tensor]


@case()
def megatron_block_sees_its_own_tokens(world: World) -> None:
    """Forwards of all microbatches, then their backwards, against the same block without TP overlap."""
    with megatron_parallel(world), userbuffers(world, CAPACITY, HIDDEN):
        expected = [run(make_block(overlap=False), lengths) for lengths in LENGTHS]
        for changes in ({}, FULL):
            block = make_block(overlap=True, **changes)
            waiting = []
            for lengths in LENGTHS:
                poison(world)
                waiting.append(forward(block, lengths))
            wrong = []
            for lengths, (leaf, output), wanted in zip(LENGTHS, waiting, expected, strict=True):
                found = backward(block, leaf, output)
                errors = {name: relative_error(found[name], tensor) for name, tensor in wanted.items()}
                wrong += [f"{lengths} {name} {error:.1e}" for name, error in errors.items() if not error < 1e-2]
            expect(world, not wrong, f"{changes}: relative errors {wrong}")
            del waiting, block


@case()
def megatron_stock_block_is_refused_at_another_t(world: World) -> None:
    """The guard, where install() was left out."""
    with megatron_parallel(world, install=False), userbuffers(world, CAPACITY, HIDDEN):
        block = make_block(overlap=True)
        try:
            forward(block, LENGTHS[1])
        except ubd.UBShapeError as error:
            expect(world, "call set_ub_active_shape" in str(error), error)
        else:
            expect(world, False, "it ran")


@case(limit_s=120)
def megatron_graphs_replay_bitwise(world: World) -> None:
    """One graph a T, replayed in any order while another T is active: the eager numbers, bit for bit."""
    from ub_dynamic.integrations import megatron

    with megatron_parallel(world), userbuffers(world, CAPACITY, HIDDEN) as manager:
        block = make_block(overlap=True)
        expected = [run(block, lengths) for lengths in LENGTHS]
        graphed = megatron.graph_decoder(block)
        for number in (0, 1, 2, 3, 4, 1, 0, 3, 2, 4, 4, 0):
            manager.set_active_shape([CAPACITY if number % 2 else 8 * world.size, HIDDEN])
            found = run(block, LENGTHS[number])
            different = [name for name, tensor in expected[number].items() if not torch.equal(found[name], tensor)]
            expect(world, not different, f"{LENGTHS[number]}: {different}")
        expect(world, graphed.captures == len(LENGTHS), graphed.captures)
        world.barrier()
        graphed.remove()


# -- a block, and what one microbatch makes of it
# ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def megatron_parallel(world: World, install: bool = True) -> Iterator[None]:
    """Megatron's groups over all ranks, and the adapter."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from ub_dynamic.integrations import megatron

    if install:
        megatron.install()
    parallel_state.initialize_model_parallel(world.size)
    model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        megatron.uninstall()


def make_block(overlap: bool, **changes: Any) -> Any:
    """Two layers of TE's modules; the same weights each time."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=True,
        tp_comm_overlap=overlap,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        **changes,
    )
    model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(1)
    return TransformerBlock(config, get_gpt_layer_with_transformer_engine_spec()).cuda()


def forward(block: Any, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    batch = ubd.PackedBatch.from_lengths(lengths, tp=tp, align=8 * tp)
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = torch.randn(batch.total_tokens, 1, HIDDEN, generator=generator).chunk(tp)
    mine = rows[parallel_state.get_tensor_model_parallel_rank()].to("cuda", torch.bfloat16)
    leaf = mine.requires_grad_()
    return leaf, block(leaf, None, packed_seq_params=batch.to_megatron("cuda"))


def backward(block: Any, leaf: torch.Tensor, output: torch.Tensor) -> Tensors:
    # Not a constant: the block's last LayerNorm takes the mean out of what it gets back, and rounding would be left.
    generator = torch.Generator("cuda").manual_seed(output.shape[0])
    output.backward(torch.randn(output.shape, generator=generator, device="cuda", dtype=output.dtype))
    found = {"output": output.detach().clone(), "input gradient": leaf.grad.detach().clone()}
    for name, parameter in block.named_parameters():
        found[name] = parameter.grad.detach().clone()
        parameter.grad = None
    return found


def run(block: Any, lengths: list[int]) -> Tensors:
    return backward(block, *forward(block, lengths))

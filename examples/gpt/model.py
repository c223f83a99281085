# SPDX-License-Identifier: Apache-2.0
"""megatron-core's GPTModel, gradients and distributed optimizer, set up as its training scripts do.

Nothing in here knows that T changes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from packed.data import VOCABULARY

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "no": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def initialize_parallel(settings: argparse.Namespace) -> None:
    """Megatron's process groups, on top of those of torch.distributed."""
    parallel_state.initialize_model_parallel(settings.tp, settings.pp, settings.vpp)


def initialize_userbuffers(capacity: int, settings: argparse.Namespace, ub_cfgs: Any = None) -> None:
    """What Megatron's ``initialize_megatron`` does with ``--tp-comm-overlap``."""
    from transformer_engine.pytorch import module as te_module

    te_module.base.initialize_ub(
        shape=[capacity, settings.hidden],
        tp_size=settings.tp,
        use_fp8=False,
        ub_cfgs=ub_cfgs,
        bootstrap_backend="gloo",
    )


def make_config(settings: argparse.Namespace, overlap: bool) -> TransformerConfig:
    """BF16, THD, sequence parallel, shapes exchanged between stages."""
    return TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=settings.heads,
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        virtual_pipeline_model_parallel_size=settings.vpp,
        sequence_parallel=True,
        tp_comm_overlap=overlap,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it where lengths vary, experts or not
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_rope_fusion=True,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=settings.pp > 1,
        overlap_p2p_comm=settings.vpp is not None,
        batch_p2p_comm=settings.vpp is None,
        calculate_per_token_loss=True,
        **_RECOMPUTE[settings.recompute],
    )


class Trained:
    """The model chunks of this rank and their optimizer."""

    def __init__(self, settings: argparse.Namespace, overlap: bool) -> None:
        self.config = make_config(settings, overlap)
        # TE's tracker of random states is the one that CUDA graphs can advance.
        model_parallel_cuda_manual_seed(settings.seed + 1, te_rng_tracker=True, force_reset_rng=True)
        torch.manual_seed(settings.seed + 1)
        chunks = range(settings.vpp or 1)
        models = [self._chunk(settings, None if settings.vpp is None else number) for number in chunks]
        gradients = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.chunks = [
            DistributedDataParallel(self.config, gradients, Float16Module(self.config, model.cuda()))
            for model in models
        ]
        for chunk in self.chunks:
            chunk.broadcast_params()
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.lr,
                weight_decay=0.01,
                adam_beta2=0.95,
                clip_grad=1.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            self.chunks,
        )
        self.config.grad_scale_func = self.optimizer.scale_loss

    def _chunk(self, settings: argparse.Namespace, stage: int | None) -> GPTModel:
        place: dict[str, Any] = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
        multiple = 8 * settings.tp
        return GPTModel(
            self.config,
            get_gpt_layer_with_transformer_engine_spec(),
            -(-VOCABULARY // multiple) * multiple,
            max(settings.max_document, 256) * settings.documents,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            position_embedding_type="rope",
            vp_stage=stage,
        )

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, learning_rate: float) -> float:
        """One optimizer step; the norm of all gradients before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        _, norm, _ = self.optimizer.step()
        return float(norm or 0.0)

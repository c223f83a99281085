# SPDX-License-Identifier: Apache-2.0
"""One pipeline rank of megatron-core on the host, started by test_megatron_schedules.py: runs Megatron's own schedules
over microbatches of different T, and writes what every layer saw.

    torchrun ... megatron_ranks.py FOLDER '{"name": {settings}, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

import megatron_cpu
import torch
import torch.distributed as dist
from fake_backend import FakeBackend

from ub_dynamic import api
from ub_dynamic.integrations import megatron
from ub_dynamic.manager import Manager

HIDDEN, CAPACITY, VOCABULARY, TP = 64, 128, 32, 2


def main(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    dist.init_process_group("gloo")
    found = {}
    with megatron_cpu.on_host():
        for name, settings in runs.items():
            events, losses, gradients = run(settings)
            found[name] = {"events": events, "losses": losses, "gradients": gradients}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(settings: dict[str, Any]) -> tuple[list[Any], list[float], list[float]]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    vpp = settings.get("vpp")
    stages = dist.get_world_size()
    parallel_state.initialize_model_parallel(1, stages, vpp)
    model_parallel_cuda_manual_seed(1)
    if settings["install"]:
        megatron.install()
    # No communicators on the host, so the manager records. What it is told is what matters here.
    manager = Manager(FakeBackend((CAPACITY, HIDDEN), TP), (CAPACITY, HIDDEN), check="never")  # type: ignore[arg-type]
    api._manager = manager
    config = megatron_cpu.config(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=vpp,
        # Two stages meet on both sides. Megatron's other way to exchange shapes then relies on NCCL to match them.
        overlap_p2p_comm=vpp is not None,
        **settings.get("config", {}),
    )
    events: list[Any] = []
    chunks = [chunk(config, None if vpp is None else number) for number in range(vpp or 1)]
    for number, model in enumerate(chunks):
        watch(model, number, manager, events)
    lengths = settings["lengths"]
    store = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches(lengths)) for _ in chunks],
        model=chunks,
        num_microbatches=len(lengths),
        seq_length=CAPACITY,
        micro_batch_size=1,
        forward_only=settings.get("forward_only", False),
    )
    sums = [float(p.grad.double().sum()) for model in chunks for p in model.parameters() if p.grad is not None]
    if settings["install"]:
        assert megatron.uninstall() == []
    api._manager = None
    parallel_state.destroy_model_parallel()
    return events, [float(each["loss"]) for each in store], sums


def chunk(config: Any, vp_stage: int | None) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    torch.manual_seed(7 + dist.get_rank() + 10 * (vp_stage or 0))
    place = {} if vp_stage is None else {"vp_stage": vp_stage, "ignore_virtual": False}
    here = config.num_layers // dist.get_world_size() // (config.virtual_pipeline_model_parallel_size or 1)
    layers = [get_gpt_layer_local_spec(normalization="LayerNorm")] * here
    return GPTModel(
        config,
        TransformerBlockSubmodules(layers, WrappedTorchNorm),
        VOCABULARY,
        CAPACITY,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )


def microbatches(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    made = []
    for number, length in enumerate(lengths):
        tokens = (torch.arange(length) * (number + 3) % VOCABULARY).unsqueeze(0)
        made.append({"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": torch.arange(length).unsqueeze(0)})
    return made


def forward_step(data: Any, model: Any) -> Any:
    batch = next(data)
    length = batch["tokens"].shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    output = model(batch["tokens"], batch["positions"], mask, labels=batch["labels"])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach()}

    return output, loss


def watch(model: Any, number: int, manager: Manager, events: list[Any]) -> None:
    """Note, for every layer's MLP, the rows that it works on and the active T, forward and backward."""
    for layer in model.decoder.layers:
        original = layer.mlp.forward

        def forward(hidden: torch.Tensor, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            rows = hidden.shape[0] * hidden.shape[1]
            events.append(["forward", number, rows, manager.active[0]])
            output = original(hidden, *args, **kwargs)
            if output[0].requires_grad:
                output[0].register_hook(lambda _: events.append(["backward", number, rows, manager.active[0]]))
            return output

        layer.mlp.forward = forward


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)

# SPDX-License-Identifier: Apache-2.0
"""pp 2 x tp 2: TP overlap inside the stages sees each microbatch's own T in forward, backward and recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ub_dynamic as ub
from ub_dynamic.backends.host import all_reduce_sequence_parallel_gradients
from ub_dynamic.pipeline import PipelineRunner, PipelineTransport
from ub_dynamic.testing.attnres import AttnResChunk, AttnResConfig, chunks_of_rank, make_batch, whole_model
from ub_dynamic.testing.attnres_tp import HostLinears, mark_replicated
from ub_dynamic.testing.pipeline_cases import Case, gradients

pytestmark = pytest.mark.mpi(4, launcher="torchrun", timeout=180)
TP, PP = 2, 2
LENGTHS = ((30, 10), (16,), (5, 9, 48), (64,), (7, 7, 7), (96,), (3, 5), (33, 70))
FLAT = Case(PP, (5, 3), 3, LENGTHS)
FOLDED = Case(PP, (2, 1, 3, 2), 3, LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """TP groups {0, 1} and {2, 3} with overlap buffers at capacity; pipelines {0, 2} and {1, 3}."""
    dist.init_process_group("gloo")
    ub.initialize_ub([128, 32], TP, dtype=torch.float32, backend="host", bootstrap_backend="gloo")
    yield
    ub.destroy_ub()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pipeline() -> dist.ProcessGroup:
    groups = [dist.new_group([rank, rank + TP]) for rank in range(TP)]
    return groups[dist.get_rank() % TP]


def config_of(case: Case) -> AttnResConfig:
    return case.config(dtype=torch.float32)


def batches_of(case: Case, config: AttnResConfig):
    return [make_batch(d, config, seed, tp=TP, align=ub.token_multiple()) for seed, d in enumerate(case.lengths)]


def unsplit_on_the_tp_group(config: AttnResConfig, batches) -> AttnResChunk:
    """The model in one piece on the same TP layers."""
    model = AttnResChunk(config, range(config.sublayers), first=True, last=True, linears=HostLinears())
    mark_replicated([model])
    for batch in batches:
        with ub.microbatch(batch):
            model(None, [], batch)[0].backward()
    all_reduce_sequence_parallel_gradients(model)
    return model


def unsplit_on_one_rank(config: AttnResConfig, batches) -> tuple[AttnResChunk, list[torch.Tensor]]:
    model = whole_model(config)
    losses = []
    for batch in batches:
        loss, _ = model(None, [], batch)
        loss.backward()
        losses.append(loss.detach())
    return model, losses


def test_a_tokens_count_that_the_layers_refuse(pipeline: dist.ProcessGroup) -> None:
    """T = 6 is fine for the transfers, not for the overlap: it is refused before anything is sent."""
    transport = PipelineTransport(pipeline, capacity=(128, 32), dtype=torch.float32, tp=TP, timeout_s=60)
    runner = PipelineRunner([lambda *_: None], transport, microbatch=ub.microbatch)
    with pytest.raises(ub.UBAlignmentError, match="the next valid T is 8"):
        runner.step([16, 8, 6])
    assert transport.traffic.messages == 0
    assert ub.get_ub_active_shape() == ub.get_ub_capacity_shape()
    transport.close()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("case", [FLAT, FOLDED], ids=["1f1b", "interleaved"])
def test_equals_one_rank(case: Case, cached: bool, recompute: bool, pipeline: dist.ProcessGroup) -> None:
    config = config_of(case)
    batches = batches_of(case, config)
    linears = HostLinears()
    transport = PipelineTransport(pipeline, capacity=(128, 32), dtype=config.dtype, tp=TP, timeout_s=60, poison=True)
    chunks = chunks_of_rank(config, case.sublayers, transport.rank, PP, linears)
    mark_replicated(chunks)
    seen = watch_shapes(chunks)
    run = [partial(checkpoint, chunk, use_reentrant=False) if recompute else chunk for chunk in chunks]
    commits = [chunk.commits for chunk in chunks]
    runner = PipelineRunner(run, transport, commits=commits, cache=cached, microbatch=ub.microbatch)
    result = runner.step(batches)
    for chunk in chunks:
        all_reduce_sequence_parallel_gradients(chunk)
    transport.close()

    check_shapes_seen(seen, batches, layers=sum(len(chunk.layers) for chunk in chunks), recompute=recompute)
    assert ub.get_ub_active_shape() == ub.get_ub_capacity_shape()
    if not cached:  # to the bit what the same layers give without a pipeline
        same = unsplit_on_the_tp_group(config, batches)
        pairs = gradients(case, transport.rank, chunks, same)
        assert [name for name, mine, theirs in pairs if not torch.equal(mine, theirs)] == []
    whole, losses = unsplit_on_one_rank(config, batches)
    for name, mine, theirs in gradients(case, transport.rank, chunks, whole, linears.share):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    if transport.rank == PP - 1:
        mine = torch.stack(result.losses)
        dist.all_reduce(mine, group=tp_group())
        torch.testing.assert_close(mine, torch.stack(losses), rtol=1e-5, atol=1e-6)


def watch_shapes(chunks) -> list[tuple[str, int, int]]:
    """(pass, T of the data, active T) of every forward and backward of a layer between the TP layers."""
    seen: list[tuple[str, int, int]] = []

    def note(what: str, rows: int) -> None:
        seen.append((what, rows * TP, ub.get_ub_active_shape()[0]))

    def watch(module, inputs, output) -> None:
        note("forward", len(output))
        output.register_hook(lambda grad: note("backward", len(grad)))

    for chunk in chunks:
        for layer in chunk.layers:
            layer.norm.register_forward_hook(watch)
    return seen


def check_shapes_seen(seen, batches, layers: int, recompute: bool) -> None:
    assert [entry for entry in seen if entry[1] != entry[2]] == []
    expected = Counter()
    for batch in batches:
        expected["forward", batch.total_tokens] += layers * (2 if recompute else 1)
        expected["backward", batch.total_tokens] += layers
    assert Counter((what, tokens) for what, tokens, _ in seen) == expected


def tp_group() -> dist.ProcessGroup:
    return ub.api.manager().backend.group.process_group

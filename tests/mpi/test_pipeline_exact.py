# SPDX-License-Identifier: Apache-2.0
"""The Block-AttnRes pipeline equals the model in one piece, and sends no more than it must, at eight different T."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ub_dynamic.pipeline import PipelineRunner, PipelineTransport, make_schedule, store_peak
from ub_dynamic.pipeline.wires import NcclWire
from ub_dynamic.testing.attnres import AttnResConfig, cut, make_batch, whole_model
from ub_dynamic.testing.pipeline_cases import (
    P4V2,
    P4V4,
    Case,
    batches_of,
    cases,
    gradients,
    in_one_piece,
    largest_difference,
    on_the_wire,
    rank_runner,
    rank_transport,
)

pytestmark = pytest.mark.usefixtures("gloo_world")
ranks = pytest.mark.mpi(1, 2, 4, launcher="torchrun", timeout=180)
CACHED_TOLERANCE = 1e-12  # the order in which a block's gradients are summed


@contextmanager
def transport_of(case: Case, config, **options) -> Iterator[PipelineTransport]:
    transport = rank_transport(case, config, poison=True, timeout_s=60, **options)
    yield transport
    transport.close()


@ranks
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_equals_the_model_in_one_piece(mpi_size: int, vpp: int, cached: bool) -> None:
    for case in cases(mpi_size, vpp):
        config = case.config()
        batches = batches_of(case, config)
        whole, losses = reference(config, case.lengths)
        with transport_of(case, config) as transport:
            runner, chunks = rank_runner(case, config, transport, cache=cached)
            result = runner.step(batches)
            pairs = gradients(case, transport.rank, chunks, whole)
            if cached:
                assert largest_difference(pairs) <= CACHED_TOLERANCE, case
            else:
                assert [name for name, mine, theirs in pairs if not torch.equal(mine, theirs)] == [], case
            last = transport.rank == mpi_size - 1
            assert torch.equal(torch.stack(result.losses), torch.stack(losses)) if last else result.losses == ()
            check_volume(case, cached, transport, result)
            check_memory(case, runner, result)


@cache
def reference(config: AttnResConfig, lengths: tuple[tuple[int, ...], ...]):
    return in_one_piece(config, [make_batch(documents, config, seed) for seed, documents in enumerate(lengths)])


def check_volume(case: Case, cached: bool, transport: PipelineTransport, result) -> None:
    """Blocks on the wire are the closed forms, forward and backward; bytes are those of each microbatch's T."""
    stages = case.pp * case.vpp
    commits = [stage for stage, count in enumerate(case.routes(cached).counts) for _ in range(count)]
    far = [stages - 1 - stage for stage in commits]
    blocks = sum(min(case.pp - 1, hops) if cached else hops for hops in far) if case.pp > 1 else 0
    hops = stages - 1 if case.pp > 1 else 0
    wire = on_the_wire(transport, result)
    for microbatch, tokens in enumerate(case.tokens):
        for direction in ("forward", "backward"):
            assert wire.blocks[direction, microbatch] == blocks, case
            row = transport.capacity[1] * transport.dtype.itemsize
            assert wire.tensor_bytes[direction, microbatch] == (blocks + hops) * tokens * row, case


def check_memory(case: Case, runner: PipelineRunner, result) -> None:
    """The store's peak is what the tables foretell, and nothing is left."""
    transport = runner.transport
    plan = make_schedule(runner.schedule, transport.rank, case.pp, case.vpp, len(case.tokens))
    row = transport.capacity[1] * transport.dtype.itemsize
    assert result.memory.store_peak_bytes == store_peak(runner.routes, transport.rank, plan, case.tokens, row)
    assert (result.memory.store_left_bytes, result.memory.buffers_leased) == (0, 0)
    assert runner.store.empty


@pytest.mark.mpi(4, launcher="torchrun")
@pytest.mark.parametrize(("case", "plain", "cached"), [(P4V4, 39, 12), (P4V2, 16, 10)], ids=["P4V4", "P4V2"])
def test_known_volumes(case: Case, plain: int, cached: int) -> None:
    config = case.config()
    batches = batches_of(case, config)
    for with_cache, expected in ((False, plain), (True, cached)):
        with transport_of(case, config) as transport:
            runner, _ = rank_runner(case, config, transport, cache=with_cache)
            wire = on_the_wire(transport, runner.step(batches))
            assert set(wire.blocks.values()) == {expected}


@pytest.mark.mpi(2, 4, launcher="torchrun")
@pytest.mark.parametrize("vpp", [1, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 7])
def test_any_number_of_microbatches(mpi_size: int, vpp: int, microbatches: int) -> None:
    """Fewer than ranks, and no multiple of them."""
    case = cases(mpi_size, vpp)[1]
    case = Case(case.pp, case.sublayers, case.block, case.lengths[:microbatches])
    config = case.config()
    batches = batches_of(case, config)
    whole, _ = reference(config, case.lengths)
    with transport_of(case, config) as transport:
        runner, chunks = rank_runner(case, config, transport, cache=True)
        runner.step(batches)
        assert largest_difference(gradients(case, transport.rank, chunks, whole)) <= CACHED_TOLERANCE


@pytest.mark.mpi(2, 4, launcher="torchrun")
@pytest.mark.parametrize("vpp", [1, 4])
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_inference_leaves_nothing(mpi_size: int, vpp: int, cached: bool) -> None:
    case = cases(mpi_size, vpp)[1]
    config = case.config()
    batches = batches_of(case, config) * 2
    whole, losses = reference(config, case.lengths)
    with transport_of(case, config) as transport:
        runner, chunks = rank_runner(case, config, transport, cache=cached)
        for _ in range(2):
            result = runner.evaluate(batches)
            assert runner.store.empty
            assert result.memory.buffers_leased == 0
            assert not any(stage._records for stage in runner.stages)
        assert all(parameter.grad is None for chunk in chunks for parameter in chunk.parameters())
        if transport.rank == mpi_size - 1:
            assert torch.equal(torch.stack(result.losses), torch.stack(losses * 2))
        runner.step(batches[:8])  # and training still works on the same buffers
        assert largest_difference(gradients(case, transport.rank, chunks, whole)) <= CACHED_TOLERANCE


@pytest.mark.mpi(2, launcher="torchrun")
@pytest.mark.parametrize("vpp", [1, 2])
def test_every_pass_sees_its_own_tokens(mpi_size: int, vpp: int) -> None:
    """Forward, backward and the recomputation inside the backward run in the microbatch's own context."""
    case = cases(mpi_size, vpp)[0]
    config = case.config()
    batches = batches_of(case, config)
    whole, _ = reference(config, case.lengths)
    active: list[int] = []
    seen: list[tuple[str, int, int]] = []  # what runs, T of its data, the active T

    @contextmanager
    def microbatch(batch) -> Iterator[None]:
        active.append(batch.total_tokens)
        yield
        active.pop()

    def watch(module: torch.nn.Module, inputs, output) -> None:
        seen.append(("forward", len(output), active[-1]))
        output.register_hook(lambda grad: seen.append(("backward", len(grad), active[-1])))

    with transport_of(case, config) as transport:
        runner, chunks = rank_runner(case, config, transport, cache=True, microbatch=microbatch)
        for stage, chunk in zip(runner.stages, chunks, strict=True):
            stage.chunk = partial(checkpoint, chunk, use_reentrant=False)
            for layer in chunk.layers:
                layer.norm.register_forward_hook(watch)
        runner.step(batches)
        assert largest_difference(gradients(case, transport.rank, chunks, whole)) <= CACHED_TOLERANCE
    layers = sum(len(chunk.layers) for chunk in chunks)
    assert [T for _, T, is_active in seen if is_active != T] == []
    for T in case.tokens:  # every layer: forward, forward again in the backward, backward
        assert Counter(what for what, tokens, _ in seen if tokens == T) == {"forward": 2 * layers, "backward": layers}


class Once:
    """Gloo's work, which must not be waited for again, as NCCL's, which may."""

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


@pytest.mark.mpi(2, 4, launcher="torchrun")
@pytest.mark.parametrize("chunks", [1, 2], ids=["1f1b", "interleaved"])
def test_rounds_that_go_together(mpi_size: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's wire, here over gloo: what a round sends and receives stays until its end."""
    batch = dist.batch_isend_irecv
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [Once(work) for work in batch(operations)])
    case = cases(mpi_size, chunks)[1]
    config = case.config()
    batches = batches_of(case, config)
    whole, _ = reference(config, case.lengths)
    with transport_of(case, config) as transport:
        members = tuple(range(mpi_size))
        transport.payload = NcclWire([members], members, transport.rank, torch.device("cpu"), 60, backend="gloo")
        for cache in (False, True):
            runner, mine = rank_runner(case, config, transport, cache=cache)
            for _ in range(2):
                for chunk in mine:
                    chunk.zero_grad()
                assert runner.step(batches).memory.buffers_leased == 0
                difference = largest_difference(gradients(case, transport.rank, mine, whole))
                assert difference <= (1e-12 if cache else 0.0)
            assert runner.evaluate(batches).memory.buffers_leased == 0


@pytest.mark.mpi(2, launcher="torchrun")
def test_frozen_layers_pass_no_gradient(mpi_size: int) -> None:
    """Nothing upstream requires a gradient: deposits are dropped, the trained part gets what it should."""
    case = cases(mpi_size, 2)[0]
    config = case.config()
    batches = batches_of(case, config)
    model = whole_model(config)
    frozen = {f"layers.{index}." for index in range(3)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "embedding" and not name.startswith(tuple(frozen)))
    for batch in batches:
        model(None, [], batch)[0].backward()
    with transport_of(case, config) as transport:
        runner, chunks = rank_runner(case, config, transport, cache=True)
        numbers = cut(case.sublayers, len(case.sublayers))
        for index, chunk in enumerate(chunks):
            if chunk.embedding is not None:
                chunk.embedding.requires_grad_(False)
            for number, layer in zip(numbers[index * mpi_size + transport.rank], chunk.layers, strict=True):
                layer.requires_grad_(number >= 3)
        runner.step(batches)
        pairs = gradients(case, transport.rank, chunks, model)
        assert largest_difference(pairs) <= CACHED_TOLERANCE
        assert len(pairs) == sum(p.requires_grad for chunk in chunks for p in chunk.parameters())
        assert runner.store.empty


@pytest.mark.mpi(2, launcher="torchrun", timeout=300)
def test_memory_does_not_grow(mpi_size: int) -> None:
    """200 steps, T in another order each time: no new buffer, no tensor more than after the first ones."""
    case = Case(2, (1, 1, 1, 1), 2, lengths=((5,), (3, 1)))
    config = case.config(hidden=8, heads=2, ffn=8)
    batches = batches_of(case, config)
    with transport_of(case, config) as transport:
        runner, _ = rank_runner(case, config, transport, cache=True)
        reports, tensors = [], []
        for step in range(200):
            turn = step % len(batches)
            reports.append(runner.step(batches[turn:] + batches[:turn]).memory)
            if step in (20, 199):
                gc.collect()
                tensors.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
        assert len({report.buffers for report in reports}) == 1
        assert {report.store_left_bytes for report in reports} == {0}
        assert tensors[0] == tensors[1]


@pytest.mark.mpi(4, launcher="torchrun")
def test_two_pipelines_side_by_side(mpi_size: int) -> None:
    """Ranks 0, 2 and ranks 1, 3 are a pipeline each; every rank makes its transport at the same time."""
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    case = cases(2, 2)[1]
    config = case.config(seed=1 + rank % 2)
    batches = batches_of(case, config)
    whole = whole_model(config)
    for batch in batches:
        whole(None, [], batch)[0].backward()
    with transport_of(case, config, group=groups[rank % 2]) as transport:
        assert transport.members == (rank % 2, rank % 2 + 2)
        runner, chunks = rank_runner(case, config, transport, cache=False)
        runner.step(batches)
        assert largest_difference(gradients(case, transport.rank, chunks, whole)) == 0.0

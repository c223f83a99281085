# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between stages is an error that names both ranks, on every rank, never a hang or a wrong sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pipeline_faults import (
    FLAT,
    FOLDED,
    LENGTHS,
    LIMIT_S,
    PATIENT_S,
    SHORT_S,
    Fault,
    Faulty,
    attempt,
    check_ended,
    check_works_again,
    make,
    told,
)

from ub_dynamic.errors import (
    UBCapacityError,
    UBDynamicError,
    UBRankMismatchError,
    UBShapeError,
    UBStateError,
    UBTimeoutError,
)
from ub_dynamic.pipeline import PipelineRunner, PipelineTransport
from ub_dynamic.pipeline.headers import Header
from ub_dynamic.testing.pipeline_cases import (
    Case,
    batches_of,
    gradients,
    in_one_piece,
    largest_difference,
    rank_transport,
)

pytestmark = [pytest.mark.mpi(2, launcher="torchrun", timeout=120), pytest.mark.usefixtures("gloo_world")]


# Message numbers of the three phases: 1F1B of six microbatches sends six each way, interleaved with two chunks twelve
# forward from rank 0 and six around the ring from rank 1, backward the other way round.
PHASES = {
    "first receive": (FLAT, "forward", 0, 0),
    "fused send-receive, forward": (FLAT, "forward", 0, 3),
    "fused send-receive, backward": (FLAT, "backward", 1, 2),
    "drain": (FLAT, "backward", 1, 4),
    "first receive, interleaved": (FOLDED, "forward", 0, 0),
    "first receive around the ring": (FOLDED, "forward", 1, 0),
    "fused send-receive, interleaved": (FOLDED, "forward", 0, 8),
    "fused send-receive, interleaved backward": (FOLDED, "backward", 1, 4),
    "drain, interleaved": (FOLDED, "backward", 1, 10),
    "drain around the ring": (FOLDED, "backward", 0, 4),
}


LOST = [(phase, "drop") for phase in PHASES]
SWAPPED = [
    (phase, "swap") for phase in ("first receive", "drain", "fused send-receive, interleaved", "drain around the ring")
]


@pytest.mark.parametrize(("phase", "kind"), [*LOST, *SWAPPED])
def test_lost_and_swapped_messages(phase: str, kind: str) -> None:
    case, direction, sender, index = PHASES[phase]
    config, transport, runner, _ = make(case, Faulty)
    transport.fault = Fault(sender, direction, index, kind)
    batches = batches_of(case, config)
    error, seconds = attempt(runner, batches)
    assert seconds < LIMIT_S
    assert isinstance(error, UBDynamicError)
    assert isinstance(error, (UBRankMismatchError, UBTimeoutError))
    assert "rank 0" in str(error)
    assert "rank 1" in str(error)
    errors = told(f"{type(error).__name__}: {error}")
    receiver = errors[1 - sender]
    assert receiver.startswith("UBRankMismatchError: microbatch differs between rank"), receiver
    assert f"rank {sender} sent microbatch" in receiver
    assert f"rank {1 - sender} expects microbatch" in receiver
    check_ended(transport, runner, error, batches)
    if phase.startswith("drain"):
        check_works_again(case)


@pytest.mark.parametrize("case", [FLAT, FOLDED], ids=["1f1b", "interleaved"])
def test_the_last_message_lost(case: Case) -> None:
    """No later message tells; the wait ends, and says what for."""
    config, transport, runner, _ = make(case, Faulty, SHORT_S)
    transport.fault = Fault(1, "backward", 6 * case.vpp - 1, "drop")
    batches = batches_of(case, config)
    error, seconds = attempt(runner, batches)
    assert seconds < LIMIT_S
    if transport.rank == 0:
        assert isinstance(error, UBTimeoutError)
        assert "rank 0 waits for the backward of microbatch 5 to stage 0 from rank 1, which has not sent it" in str(
            error
        )
        assert "no answer within 3 s" in str(error)
    check_ended(transport, runner, error, batches)


class LosesOne:
    """A wire that loses message ``serial``."""

    def __init__(self, wire, serial: int) -> None:
        self.together, self._wire, self._serial = wire.together, wire, serial

    def send(self, tensors, peer, direction, serial):
        if serial == self._serial:
            return self
        return self._wire.send(tensors, peer, direction, serial)

    def receive(self, *args):
        return self._wire.receive(*args)

    def wait(self, what: str) -> None: ...

    def launch(self) -> None:
        self._wire.launch()

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("part", "says"),
    [("headers", "which has not sent it"), ("payload", "has the header of the forward of microbatch 2 to stage 1")],
)
def test_half_a_message_lost(part: str, says: str) -> None:
    """The next message's tensors do not take the place of those that are lost."""
    config, transport, runner, _ = make(FLAT, wait_s=SHORT_S)
    if transport.rank == 0:
        setattr(transport, part, LosesOne(getattr(transport, part), 2))
    error, seconds = attempt(runner, batches_of(FLAT, config))
    assert seconds < LIMIT_S
    assert isinstance(error, UBDynamicError)
    errors = told(str(error))
    assert says in errors[1]
    assert "rank 1" in errors[1]
    assert "rank 0" in errors[1]
    transport.close()


def test_tokens_differ() -> None:
    """The data loaders of two ranks disagree on the T of one microbatch."""
    config, transport, runner, _ = make(FLAT)
    lengths = [list(documents) for documents in LENGTHS]
    lengths[3 * transport.rank] = [6 - transport.rank]  # rank 1: microbatch 3 has 5 tokens instead of 6
    batches = batches_of(replace(FLAT, lengths=lengths), config)
    error, seconds = attempt(runner, batches)
    assert seconds < LIMIT_S
    assert isinstance(error, UBRankMismatchError)
    said = told(str(error))[1]
    first = lengths[0]
    assert first == [6] or transport.rank == 1
    assert "tokens differs between rank 0 and rank 1" in said
    assert "rank 0 sent tokens" in said
    check_ended(transport, runner, error, batches)


def test_block_counts_differ() -> None:
    """Routes that are not the same on both ranks, as if one had been told something else."""
    config, transport, runner, _ = make(FLAT)
    if transport.rank == 1:
        wrong = replace(runner.routes, counts=(1, 1))
        runner.routes = wrong
        for stage in runner.stages:
            stage.routes = wrong
    error, seconds = attempt(runner, batches_of(FLAT, config))
    assert seconds < LIMIT_S
    assert isinstance(error, UBRankMismatchError)
    assert "rank 0 sent blocks 2" in told(str(error))[1]
    assert "rank 1 expects blocks 1" in told(str(error))[1]
    transport.close()


def test_a_chunk_commits_another_number_of_blocks_the_second_time() -> None:
    config, transport, runner, _ = make(FLAT)
    batches = batches_of(FLAT, config)
    inner, calls = runner.stages[0].chunk, []

    def chunk(hidden, blocks, batch):
        output, committed = inner(hidden, blocks, batch)
        calls.append(batch)
        return output, [*committed, committed[-1]] if len(calls) == 2 else committed

    if transport.rank == 0:
        runner.stages[0].chunk = chunk
    error, seconds = attempt(runner, batches)
    assert seconds < LIMIT_S
    assert isinstance(error, UBShapeError)
    assert all("the chunk of stage 0 committed 3 blocks, it was built for 2" in text for text in told(str(error)))
    check_ended(transport, runner, error, batches)


def test_step_counts_differ() -> None:
    """One rank has more microbatches than the other."""
    config, transport, runner, _ = make(FLAT)
    batches = batches_of(FLAT, config)[: 6 - transport.rank]
    error, _ = attempt(runner, batches)
    assert isinstance(error, UBRankMismatchError)
    assert "rank 0 sent microbatches 6" in told(str(error))[1]
    transport.close()


@pytest.mark.parametrize(
    ("case", "culprit", "where"),
    [(FLAT, 0, "forward"), (FLAT, 1, "backward"), (FOLDED, 0, "backward"), (FOLDED, 1, "forward")],
)
def test_a_failed_microbatch_leaves_nothing(case: Case, culprit: int, where: str) -> None:
    """A model that raises in the middle: every rank stops, with that text, and the next attempt is right."""
    config, transport, runner, _ = make(case)
    batches = batches_of(case, config)
    inner = runner.stages[-1].chunk

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError("lost in the backward")

    def chunk(hidden, blocks, batch):
        if batch is batches[3] and where == "forward":
            raise ZeroDivisionError("lost in the forward")
        output, committed = inner(hidden, blocks, batch)
        return (Raises.apply(output) if batch is batches[3] else output), committed

    if transport.rank == culprit:
        runner.stages[-1].chunk = chunk
    error, seconds = attempt(runner, batches)
    assert seconds < LIMIT_S
    if transport.rank == culprit:
        assert type(error) is ZeroDivisionError
    else:
        assert isinstance(error, UBStateError)
        assert f"rank {1 - culprit} stops, as rank {culprit} reports a failure: ZeroDivisionError: lost in" in str(
            error
        )
    check_ended(transport, runner, error, batches)
    check_works_again(case)


def test_wrong_input_is_refused_before_anything_is_sent() -> None:
    """The same runner goes on afterwards, with right results."""
    config, transport, runner, chunks = make(FLAT)
    batches = batches_of(FLAT, config)
    longer = batches_of(replace(FLAT, lengths=((5,), (9,))), config)
    for wrong, kind, says in (
        (longer, UBCapacityError, "T = 9 tokens exceed the pipeline's capacity of 8 tokens"),
        ([batches[0], 0], UBShapeError, "T = 0"),
        ([batches[0], "seven"], UBShapeError, "microbatch 1: T is 'seven'"),
        ([], UBShapeError, "microbatches = 0: it must be at least 1"),
    ):
        with pytest.raises(kind, match=says):
            runner.step(wrong)
    if transport.rank == 0:
        with pytest.raises(UBShapeError, match="the first stage needs every batch"):
            runner.step([batches[0], None])
    whole, _ = in_one_piece(config, batches)
    runner.step(batches)
    assert largest_difference(gradients(FLAT, transport.rank, chunks, whole)) <= 1e-12
    transport.close()


@pytest.mark.parametrize(("what", "says"), [("cache", "differ in cache"), ("chunks", "differ in chunks")])
def test_ranks_that_build_different_routes(what: str, says: str) -> None:
    config = FOLDED.config(hidden=8, heads=2, ffn=8)
    transport = rank_transport(FOLDED, config, timeout_s=PATIENT_S)
    number = 2 + (what == "chunks" and transport.rank)
    cache = what == "chunks" or transport.rank == 0
    with pytest.raises(UBRankMismatchError, match=f"{says}: rank 0: .*, rank 1: "):
        PipelineRunner([lambda *_: None] * number, transport, commits=[1] * number, cache=cache)
    transport.close()


def test_every_message_has_its_own_shape() -> None:
    """Straight through the transport: the second message has another T and another block count than the first."""
    transport = PipelineTransport(capacity=(9, 4), dtype=torch.float32, timeout_s=PATIENT_S)
    shapes = [(5, 1), (9, 3), (2, 0), (9, 1)]
    for microbatch, (tokens, blocks) in enumerate(shapes):
        header = Header("forward", 1, len(shapes), 1, microbatch, tokens, blocks, torch.float32, 4)
        tensors = [torch.full((tokens, 4), 10.0 * microbatch + part) for part in range(1 + blocks)]
        if transport.rank == 0:
            transport.send(header, tensors)
        else:
            message = transport.wait(transport.post(replace(header, tokens=tokens if microbatch % 2 else None)))
            assert (message.tokens, len(message.blocks)) == (tokens, blocks)
            assert all(map(torch.equal, [message.hidden, *message.blocks], tensors))
            for lease in message.leases:
                lease.release()
    transport.flush()
    assert transport.pool.made == (4 if transport.rank else 0)
    transport.close()

# SPDX-License-Identifier: Apache-2.0
"""PipelineRunner: goes through a schedule, pass by pass, with each microbatch's own T.

Every forward and every backward (and with it recomputation) runs inside ``microbatch(batch)``, so whatever
overlaps communication inside a stage sees the T of the microbatch that it works on, in any order of passes::

    transport = PipelineTransport(group, capacity=(T_cap, H), dtype=torch.bfloat16, device="cuda")
    runner = PipelineRunner(chunks, transport, commits=[...], microbatch=ub_dynamic.microbatch)
    result = runner.step(batches)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..batches import tokens_of
from ..errors import UBShapeError
from .headers import Header
from .memory import MemoryReport
from .messages import Arrival, Message, Traffic
from .p2p import PipelineTransport
from .rounds import Round, make_rounds
from .routes import BlockRoutes
from .schedules import Action, ScheduleName
from .stage import BlockStage, Chunk, Output
from .store import BlockStore

MicrobatchContext = Callable[[Any], AbstractContextManager[Any]]

_INFERENCE_SENDS = 2  # under way at once on a channel where no gradient comes back to complete them


@dataclass(frozen=True)
class StepResult:
    """``losses``: one scalar a microbatch on the rank of the last stage, detached and on their device; () elsewhere."""

    losses: tuple[torch.Tensor, ...]
    traffic: Traffic
    memory: MemoryReport


class PipelineRunner:
    """The chunks of one rank, and the schedule that they run in.

    ``chunks[v]`` is stage ``v * pp + rank`` (see :data:`~ub_dynamic.pipeline.stage.Chunk`); ``commits[v]``: blocks
    of attention residuals that it commits, by default none. ``cache``: keep blocks on the rank instead of sending
    them again. ``microbatch``: a context-manager factory (``ub_dynamic.microbatch``), called with a batch, or with T
    where the batch is None; each new T enters it once before the step, so that one that it refuses is refused before
    anything is sent. ``schedule``: by default 1F1B with one chunk, interleaved with several. All ranks of the
    pipeline make one.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        transport: PipelineTransport,
        *,
        commits: Sequence[int] | None = None,
        cache: bool = True,
        microbatch: MicrobatchContext | None = None,
        schedule: ScheduleName | None = None,
    ) -> None:
        commits = [0] * len(chunks) if commits is None else list(commits)
        if len(commits) != len(chunks) or not chunks:
            raise UBShapeError(
                f"{len(chunks)} chunks and {len(commits)} commits: one number for each chunk, at least one"
            )
        self.transport = transport
        self.routes = BlockRoutes.exchange(transport.control, commits, cache=cache)
        self.store = BlockStore()
        self.stages = [
            BlockStage(chunk, index * transport.size + transport.rank, self.routes, self.store)
            for index, chunk in enumerate(chunks)
        ]
        self.schedule: ScheduleName = schedule or ("1f1b" if len(chunks) == 1 else "interleaved")
        self._microbatch: MicrobatchContext = microbatch or nullcontext
        self._steps = 0
        self._accepted: set[int] = set()  # T that the microbatch context has taken
        self._batches: Sequence[Any] = ()
        self._tokens: dict[int, int] = {}
        self._losses: dict[int, torch.Tensor] = {}

    def step(self, batches: Sequence[Any]) -> StepResult:
        """Forward and backward of every microbatch; gradients add up in the parameters.

        ``batches``: anything with ``total_tokens`` (``local_tokens`` with context parallelism), or T itself, as the
        same data loader gives them to every rank. A rank of a later stage may pass None for a batch that its
        chunks do not need: T then comes with the header.

        Raises, before anything is sent, :class:`UBCapacityError`, :class:`UBAlignmentError` or
        :class:`UBShapeError` for a T that does not fit; :class:`UBRankMismatchError` where the ranks' tables differ;
        :class:`UBTimeoutError` for a neighbour that does not answer. After an error in a pass the store is empty,
        every rank stops, and a new transport is needed.
        """
        return self._go(self.schedule, batches, training=True)

    def evaluate(self, batches: Sequence[Any]) -> StepResult:
        """Forward only, without gradients; nothing is kept."""
        return self._go("forward", batches, training=False)

    # -- inside ----------------------------------------------------------------------------------------------

    def _go(self, schedule: ScheduleName, batches: Sequence[Any], training: bool) -> StepResult:
        size, rank = self.transport.size, self.transport.rank
        rounds = make_rounds(schedule, rank, size, len(self.stages), len(batches))
        self._begin(batches)
        try:
            self._run(rounds, training)
            self.transport.flush()
        except BaseException as error:
            for stage in self.stages:
                stage.drop()
            self.store.clear()
            self.transport.abort(error)
            raise
        finally:
            self._batches = ()
        losses = tuple(self._losses[index] for index in sorted(self._losses))
        report = MemoryReport.of(self.store, self.transport.pool)
        return StepResult(losses, self.transport.traffic, report)

    def _begin(self, batches: Sequence[Any]) -> None:
        """Check every T that is known, before anything is sent."""
        tokens = {index: tokens_of(batch) for index, batch in enumerate(batches) if batch is not None}
        for index, count in tokens.items():
            if type(count) is not int:
                raise UBShapeError(f"microbatch {index}: T is {count!r}; a batch has total_tokens, or is T itself")
            self.transport.check_tokens(count)
        if self.transport.rank == 0 and len(tokens) != len(batches):
            raise UBShapeError("the rank of the first stage needs every batch: it makes the hidden states of them")
        for index, count in tokens.items():
            if count not in self._accepted:
                with self._microbatch(batches[index]):
                    self._accepted.add(count)
        self.transport.begin_step()
        self._steps += 1
        self._batches, self._tokens, self._losses = batches, tokens, {}
        self.store.peak_bytes = 0

    def _run(self, rounds: Sequence[Round], training: bool) -> None:
        arrivals: dict[Action, Arrival] = {}
        for action, coming in rounds:
            if action is not None:
                arrival = arrivals.pop(action, None)
                self._pass(action, self.transport.wait(arrival) if arrival else None, training)
            posted = {each: self.transport.post(self._expected(each)) for each in coming}
            self.transport.exchange(list(posted.values()))
            arrivals |= posted

    def _pass(self, action: Action, message: Message | None, training: bool) -> None:
        """Compute, and send what comes out."""
        if message:
            self._tokens.setdefault(action.microbatch, message.tokens)
        batch = self._batches[action.microbatch]
        stage = self.stages[action.chunk]
        with self._microbatch(self._tokens[action.microbatch] if batch is None else batch):
            if action.kind == "forward":
                output: Output | None = stage.forward(action.microbatch, batch, message, training)
            else:
                output = stage.backward(action.microbatch, message)
        if action.kind == "forward" and stage.last:
            assert output is not None
            self._losses[action.microbatch] = output.tensors[0]
        elif output is not None:
            self._send(action, output, training)

    def _expected(self, action: Action) -> Header:
        """What has to arrive before this pass."""
        stage = self.stages[action.chunk].stage
        blocks = len(self.routes.received(stage) if action.kind == "forward" else self.routes.send[stage])
        return self._header(action, stage, blocks)

    def _send(self, action: Action, output: Output, training: bool) -> None:
        stage = self.stages[action.chunk].stage
        target = stage + 1 if action.kind == "forward" else stage - 1
        self.transport.check_tensors(output.tensors, self._tokens[action.microbatch])
        header = self._header(action, target, len(output.tensors) - 1)
        limit = None if training else _INFERENCE_SENDS
        self.transport.send(header, output.tensors, output.leases, limit)

    def _header(self, action: Action, stage: int, blocks: int) -> Header:
        return Header(
            direction=action.kind,
            step=self._steps,
            microbatches=len(self._batches),
            stage=stage,
            microbatch=action.microbatch,
            tokens=self._tokens.get(action.microbatch),
            blocks=blocks,
            dtype=self.transport.dtype,
            width=self.transport.capacity[1],
        )

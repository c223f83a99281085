# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism with a T of its own for every microbatch, and the block cache of attention residuals."""

from .memory import MemoryReport, store_peak
from .messages import Traffic
from .p2p import PipelineTransport
from .routes import BlockRoutes
from .runner import PipelineRunner, StepResult
from .schedules import Action, forward_only, interleaved_1f1b, make_schedule, one_f_one_b
from .stage import BlockStage, Chunk
from .store import BlockStore
from .timeline import Timeline, simulate, timeline

__all__ = [
    "Action",
    "BlockRoutes",
    "BlockStage",
    "BlockStore",
    "Chunk",
    "MemoryReport",
    "PipelineRunner",
    "PipelineTransport",
    "StepResult",
    "Timeline",
    "Traffic",
    "forward_only",
    "interleaved_1f1b",
    "make_schedule",
    "one_f_one_b",
    "simulate",
    "store_peak",
    "timeline",
]

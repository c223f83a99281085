# SPDX-License-Identifier: Apache-2.0
"""What the host backend can show in one process: the trace, registered memory, and layers without TP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ub_dynamic as ubd
from ub_dynamic.backends.host import (
    ColumnParallelLinear,
    HostBackend,
    RowParallelLinear,
    all_reduce_sequence_parallel_gradients,
    trace,
)
from ub_dynamic.backends.host.buffers import ALIGNMENT, RegisteredMemory, allocated_bytes, allocation_count
from ub_dynamic.backends.host.trace import GEMM, TRANSFER, WAIT, Span
from ub_dynamic.groups import SoloGroup
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.shapes import CommSpec


@pytest.mark.parametrize(
    ("transfers", "gemms", "expected"),
    [
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 10)], [], 0.0),
        ([(0, 10)], [(5, 20)], 0.5),
        ([(0, 10), (5, 10), (20, 30)], [(8, 25)], 7 / 20),
        ([(0, 4), (6, 8)], [(1, 2), (3, 7)], 3 / 6),
        ([], [(0, 5)], 1.0),
    ],
)
def test_hidden_fraction(transfers: list[tuple[int, int]], gemms: list[tuple[int, int]], expected: float) -> None:
    spans = [Span(TRANSFER, "t", *interval) for interval in transfers] + [Span(GEMM, "g", *i) for i in gemms]
    assert trace.hidden_fraction([*spans, Span(WAIT, "o", 0, 100)]) == pytest.approx(expected)


def test_trace_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    trace.save(file, [[Span(GEMM, "qkv", 1000, 4000)], [Span(TRANSFER, "chunk 1", 2000, 3000, nbytes=64)]])
    events = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans] == [(0, "qkv", 1.0, 3.0), (1, "chunk 1", 2.0, 1.0)]
    assert spans[1]["args"] == {"bytes": 64}
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}


def test_trace_is_off_until_started() -> None:
    assert trace.active() is None
    tracer = trace.start()
    assert trace.active() is tracer
    assert trace.stop() is tracer
    assert trace.active() is None
    assert trace.stop() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registered_memory(dtype: torch.dtype) -> None:
    count, nbytes = allocation_count(), allocated_bytes()
    memory = RegisteredMemory(1000, dtype)
    assert allocation_count() == count + 1
    assert allocated_bytes() >= nbytes + 1000 * dtype.itemsize
    assert memory.flat.data_ptr() % ALIGNMENT == 0
    region = memory.region(30, (4, 5))
    region.tensor.fill_(1.5)
    assert region.data.nbytes == 20 * dtype.itemsize
    assert bytes(region.data) == bytes(torch.full((20,), 1.5, dtype=dtype).view(torch.uint8).tolist())
    assert memory.flat.sum() == 30
    assert allocation_count() == count + 1


def test_layers_on_one_rank() -> None:
    ubd.initialize_ub((64, 32), 1, dtype=torch.float32, backend="host")
    try:
        torch.manual_seed(0)
        column, row = ColumnParallelLinear(32, 48, ub_name="fc1"), RowParallelLinear(48, 32, ub_name="fc2")
        torch.manual_seed(0)
        first, second = torch.nn.Linear(32, 48), torch.nn.Linear(48, 32)
        x = torch.randn(7, 32)  # without TP every T is valid
        with ubd.microbatch(7):
            row(column(x)).square().sum().backward()
        second(first(x)).square().sum().backward()
        all_reduce_sequence_parallel_gradients(column)
        for ours, theirs in ((column, first), (row, second)):
            torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=1e-4, atol=1e-5)
    finally:
        ubd.destroy_ub()


def test_a_group_of_another_size_is_refused() -> None:
    class Two(SoloGroup):
        size = 2

    spec = CommSpec("qkv_fprop", "ring_exchange", "ag", (64, 32), 4, torch.float32)
    with pytest.raises(ubd.UBShapeError, match="is for tp = 4, but the TP group has 2 ranks"):
        HostBackend([spec], Two())


def test_a_policy_on_one_rank_has_no_effect_and_says_so() -> None:
    manager = ubd.initialize_ub(
        (64, 32), 1, dtype=torch.float32, backend="host", policy=lambda gemm, tokens: OverlapConfig("ring_exchange")
    )
    try:
        assert "nothing to communicate" in manager.backend.notes["method"]
        ubd.set_ub_active_shape([7, 32])
        RowParallelLinear(48, 32, ub_name="fc2")(torch.randn(7, 48))
    finally:
        ubd.destroy_ub()

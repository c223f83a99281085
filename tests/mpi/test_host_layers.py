# SPDX-License-Identifier: Apache-2.0
"""The layers as a model uses them: shapes, frozen weights, no_grad, recomputation, the guard, and their state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ub_dynamic as ubd
from ub_dynamic.backends.host import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_reduce_sequence_parallel_gradients,
    current_backend,
    get_ub,
    trace,
)
from ub_dynamic.backends.host.buffers import allocation_count

HIDDEN, ROWS = 64, 32  # ROWS: tokens a rank owns at capacity
CONFIGS: list[dict[str, Any]] = [
    {},
    {
        "qkv_dgrad": {"method": "ring_exchange"},
        "proj_fprop": {"method": "ring_exchange"},
        "qkv_fprop": {"aggregate": True},
    },
    {"qkv_dgrad": {"method": "pipeline"}, "proj_dgrad": {"aggregate": True}},
]


@pytest.fixture
def userbuffers(mpi_comm: Any, request: pytest.FixtureRequest) -> Iterator[int]:
    """The communicators of float32 at capacity; the value is tp."""
    tp = mpi_comm.Get_size()
    options = getattr(request, "param", {})
    ubd.initialize_ub((ROWS * tp, HIDDEN), tp, dtype=torch.float32, backend="host", tp_group=mpi_comm, **options)
    yield tp
    ubd.destroy_ub()


class Block(torch.nn.Module):
    def __init__(self, overlap: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.column = ColumnParallelLinear(HIDDEN, 128, ub_name="qkv", overlap=overlap)
        self.row = RowParallelLinear(128, HIDDEN, ub_name="proj", overlap=overlap)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.row(torch.tanh(self.column(x)))


def data(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(current_backend().group.rank)
    return torch.randn(shape, generator=generator)


def gradients(block: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    block.zero_grad()
    leaf = x.clone().requires_grad_()
    out = block(leaf)
    (out * out).sum().backward()
    all_reduce_sequence_parallel_gradients(block)
    found = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": leaf.grad, **found}  # type: ignore[dict-item]


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize("userbuffers", [{"ub_cfgs": config} for config in CONFIGS], indirect=True)
def test_overlap_gives_the_plain_result(userbuffers: int) -> None:
    for rows in (ROWS, 8, 24):
        with ubd.microbatch(rows * userbuffers):
            assert_close(gradients(Block(), data(rows, HIDDEN)), gradients(Block(overlap=False), data(rows, HIDDEN)))


@pytest.mark.mpi(2)
def test_sequence_batch_hidden(userbuffers: int) -> None:
    with ubd.microbatch(16 * userbuffers):
        x = data(16, HIDDEN)
        flat, cube = gradients(Block(), x), gradients(Block(), x.view(4, 4, HIDDEN))
    assert cube["out"].shape == (4, 4, HIDDEN)
    assert all(torch.equal(flat[name].flatten(), cube[name].flatten()) for name in flat)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("userbuffers", [{"ub_cfgs": config} for config in CONFIGS], indirect=True)
@pytest.mark.parametrize("frozen", ["weights", "column", "input"])
def test_what_needs_no_gradient(userbuffers: int, frozen: str) -> None:
    overlapping, plain = Block(), Block(overlap=False)
    results = []
    for block in (overlapping, plain):
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(frozen == "input" or (frozen == "column" and name.startswith("row")))
        x = data(ROWS, HIDDEN).requires_grad_(frozen != "input")
        out = block(x)
        out.square().sum().backward()
        grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
        results.append({"out": out.detach(), **grads, **({} if x.grad is None else {"x": x.grad})})
    assert_close(*results)
    assert len(results[0]) == {"weights": 2, "column": 4, "input": 5}[frozen]


@pytest.mark.mpi(2)
def test_no_grad_and_recomputation(userbuffers: int) -> None:
    block = Block()
    with ubd.microbatch(8 * userbuffers) as first:
        expected = gradients(block, data(8, HIDDEN))
        with torch.no_grad():
            assert torch.equal(block(data(8, HIDDEN)), expected["out"])
        block.zero_grad()
        leaf = data(8, HIDDEN).requires_grad_()
        out = first.bind_backward(checkpoint(block, leaf, use_reentrant=False))
    with ubd.microbatch(24 * userbuffers):  # another microbatch overwrites every buffer before that backward
        block(data(24, HIDDEN))
    (out * out).sum().backward()
    all_reduce_sequence_parallel_gradients(block)
    assert torch.equal(leaf.grad, expected["x"])  # type: ignore[arg-type]
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter.grad, expected[name])  # type: ignore[arg-type]


@pytest.mark.mpi(2)
def test_nothing_that_autograd_keeps_lies_in_a_buffer(userbuffers: int) -> None:
    backend = current_backend()
    ranges = [
        (comm.get_buffer().data_ptr(), comm.get_buffer().data_ptr() + comm.layout.capacity_nbytes)
        for comm in map(get_ub, backend.specs)
    ]
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = Block()(data(ROWS, HIDDEN).requires_grad_())
    assert len(saved) >= 4
    for tensor in [*saved, out]:
        assert not any(begin <= tensor.data_ptr() < end for begin, end in ranges)
    out.sum().backward()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("userbuffers", [{}, {"guard": False}], indirect=True)
def test_other_tokens_than_the_active_shape_are_refused(userbuffers: int) -> None:
    block = Block()
    ubd.set_ub_active_shape((8 * userbuffers, HIDDEN))
    names = [name for name in current_backend().specs if name.startswith(("qkv", "proj"))]
    for name in names:
        get_ub(name).poison(3.0)
    for rows in (9, 4):
        with pytest.raises(
            ubd.UBShapeError, match=rf"qkv_fprop.* {rows * userbuffers} tokens, the active shape is 16 "
        ):
            block(data(rows, HIDDEN))
        with pytest.raises(ubd.UBShapeError, match=r"proj_fprop.* tokens, the active shape is 16 "):
            block.row(data(rows * userbuffers, 128 // userbuffers))
    assert all(bool((get_ub(name).get_buffer() == 3.0).all()) for name in names)  # nothing was copied
    assert current_backend().busy() is None
    out = block(data(8, HIDDEN).requires_grad_())
    ubd.set_ub_active_shape((16 * userbuffers, HIDDEN))
    with pytest.raises(ubd.UBShapeError, match="proj_dgrad"):
        out.sum().backward()
    ubd.set_ub_active_shape((8 * userbuffers, HIDDEN))
    block(data(8, HIDDEN)).sum()


@pytest.mark.mpi(2)
def test_what_does_not_fit_a_layer(userbuffers: int) -> None:
    block = Block()
    with pytest.raises(ubd.UBShapeError, match=r"expects an input of \[tokens, 64\], got \[32, 65\]"):
        block.column(data(ROWS, HIDDEN + 1))
    with pytest.raises(ubd.UBShapeError, match=r"dimension 0 of the input is 33.*next valid value is 34"):
        block.row(data(33, 64))
    with pytest.raises(ubd.UBShapeError, match="weight is torch.float32 on cpu, the input is torch.bfloat16"):
        block(data(ROWS, HIDDEN).bfloat16())
    with pytest.raises(ubd.UBShapeError, match="holds torch.float32, the operand is torch.bfloat16"):
        block.to(torch.bfloat16)(data(ROWS, HIDDEN).bfloat16())
    with pytest.raises(ubd.UBShapeError, match="out_features = 9 cannot be split over 2 TP ranks"):
        ColumnParallelLinear(HIDDEN, 9, ub_name="qkv")
    with pytest.raises(ubd.UBUnsupportedError, match="ub_name = 'proj': a ColumnParallelLinear is qkv or fc1"):
        ColumnParallelLinear(HIDDEN, 64, ub_name="proj")
    assert current_backend().busy() is None


@pytest.mark.mpi(2)
@pytest.mark.parametrize("userbuffers", [{"auto": True}], indirect=True)
def test_auto_needs_no_calls(userbuffers: int) -> None:
    block, reference = Block(), Block(overlap=False)
    waiting = []
    for rows in (8, 24, 16):
        x = data(rows, HIDDEN)
        leaf = x.clone().requires_grad_()
        waiting.append((block(leaf), leaf, gradients(reference, x)["x"]))
        assert ubd.get_ub_active_shape() == (rows * userbuffers, HIDDEN)
    for out, leaf, expected in waiting:
        (out * out).sum().backward()
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.mpi(2)
def test_methods_of_a_communicator(userbuffers: int) -> None:
    comm = get_ub("qkv_fprop")
    assert comm.is_p2p_overlap()
    assert not get_ub("qkv_dgrad").is_p2p_overlap()
    ubd.set_ub_active_shape((16, HIDDEN))
    local = data(8, HIDDEN)
    comm.copy_into_buffer(local, local_chunk=True)
    assert torch.equal(comm.get_buffer(local_chunk=True), local)
    assert comm.get_buffer().shape == (16, HIDDEN)
    assert comm.get_buffer(shape=(4, 4, HIDDEN)).shape == (4, 4, HIDDEN)
    with pytest.raises(ubd.UBShapeError, match=r"shape \[4, 64\] does not have the 1024 elements"):
        comm.get_buffer(shape=(4, HIDDEN))
    with pytest.raises(ubd.UBShapeError, match="does not fit the local chunk of 512 elements"):
        comm.copy_into_buffer(data(9, HIDDEN), local_chunk=True)
    with pytest.raises(ubd.UBStateError, match="filled buffers wait for their operation: qkv_fprop"):
        ubd.set_ub_active_shape((32, HIDDEN))
    with comm.all_gather():
        pass
    ubd.set_ub_active_shape((32, HIDDEN))
    with pytest.raises(ubd.UBStateError, match="no communicator 'proj_wgrad'.*MXFP8"):
        get_ub("proj_wgrad")
    with pytest.raises(ubd.UBUnsupportedError, match="FP8"):
        get_ub("qkv_fprop", use_fp8=True)
    assert ubd.get_buffer_active_shape(comm) == (32, HIDDEN)


@pytest.mark.mpi(2)
def test_another_thread_must_wait(userbuffers: int) -> None:
    comm, seen = get_ub("qkv_fprop"), []

    def intrude() -> None:
        for action in (
            lambda: get_ub("qkv_dgrad").copy_into_buffer(data(ROWS, HIDDEN), local_chunk=True),
            lambda: ubd.set_ub_active_shape((16, HIDDEN)),
        ):
            try:
                action()
            except ubd.UBStateError as error:
                seen.append(str(error))

    comm.copy_into_buffer(data(ROWS, HIDDEN), local_chunk=True)
    with comm.all_gather():
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert "another thread is in the middle" in seen[0]
    assert "an overlap operation is under way" in seen[1]
    Block()(data(ROWS, HIDDEN))  # and nothing is broken


@pytest.mark.mpi(2)
def test_an_operation_left_early_ends_the_backend(mpi_comm: Any) -> None:
    ubd.initialize_ub((64, HIDDEN), 2, dtype=torch.float32, backend="host", tp_group=mpi_comm, check="never")
    comm = get_ub("qkv_fprop")
    comm.copy_into_buffer(data(ROWS, HIDDEN), local_chunk=True)
    for _ in comm.all_gather_chunks():
        break
    for _ in range(2):
        with pytest.raises(ubd.UBStateError, match="an earlier operation failed.*qkv_fprop was left before its end"):
            Block()(data(ROWS, HIDDEN))
    backend = current_backend()
    ubd.destroy_ub()
    assert backend._abort is not None
    backend._abort.uninstall()  # else this process would end the run at its exit, as it should


@pytest.mark.mpi(2)
def test_initialise_twice_and_again(mpi_comm: Any) -> None:
    for _ in range(3):
        ubd.initialize_ub((64, HIDDEN), 2, backend="host", tp_group=mpi_comm)
        with pytest.raises(ubd.UBStateError, match="already initialised"):
            ubd.initialize_ub((64, HIDDEN), 2, backend="host", tp_group=mpi_comm)
        ubd.destroy_ub()
        with pytest.raises(ubd.UBStateError, match="call initialize_ub first"):
            get_ub("qkv_fprop")
        ubd.destroy_ub()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ub_dynamic")]


@pytest.mark.mpi(2)
def test_float16_is_refused(mpi_comm: Any) -> None:
    with pytest.raises(ubd.UBUnsupportedError, match="float32 and bfloat16, not torch.float16"):
        ubd.initialize_ub((64, HIDDEN), 2, dtype=torch.float16, backend="host", tp_group=mpi_comm)
    assert not ubd.is_ub_initialized()


@pytest.mark.mpi(2)
def test_trace_of_a_block(userbuffers: int, mpi_comm: Any, ranks_tmp_path: Any) -> None:
    block = Block()
    count = allocation_count()
    trace.start()
    gradients(block, data(ROWS, HIDDEN))
    tracer = trace.stop()
    assert tracer is not None
    names = {span.name for span in tracer.spans if span.track == trace.TRANSFER}
    for expected in (
        "ring all-gather on qkv_fprop",
        "pipeline reduce-scatter on proj_fprop, block 3",
        "ring all-gather on proj_dgrad",
        "bulk all-gather on qkv_dgrad",
        "bulk reduce-scatter on qkv_wgrad",
    ):
        assert any(name.startswith(expected) for name in names), (expected, names)
    gemms = [span.name for span in tracer.spans if span.track == trace.GEMM]
    assert len(gemms) == 2 + 4 + 2 + 1 + 2  # column, row's blocks, row's dgrad, its wgrad, column's dgrad and wgrad
    fraction = trace.gather_and_save(ranks_tmp_path / "trace.json", tracer, current_backend().group)
    assert 0.0 <= fraction <= 1.0
    assert allocation_count() == count

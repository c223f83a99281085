# SPDX-License-Identifier: Apache-2.0
"""The comparison of ``benchmarks/cp_te.py`` on CPU ranks: TE's attention module down to the emulated kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("NVTE_TORCH_COMPILE", "0")

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformer_engine")
import transformer_engine.pytorch as te
from cp_emulation import STRAY, Stream, on_cpu  # type: ignore[import-not-found]
from transformer_engine.pytorch.attention.dot_product_attention import backends
from transformer_engine.pytorch.attention.dot_product_attention import utils as dpa_utils

pytestmark = pytest.mark.te
FUSED = backends.FusedAttnBackend["F16_arbitrary_seqlen"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # put back what the program changes
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(te.DotProductAttention, "prepare_forward", lambda self, inp, *_, **__: inp)
    monkeypatch.setattr(dpa_utils, "get_attention_backend", lambda _: (False, None, True, FUSED, False, None))
    program = import_module("cp_te")
    monkeypatch.setattr(program, "no_host_sync", contextlib.nullcontext)
    monkeypatch.setattr(program, "STEPS", 4)
    with on_cpu():
        yield program


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.mpi(2, launcher="torchrun")
def test_stock_and_ours_agree_in_every_bit(program: Any) -> None:
    world = SimpleNamespace(rank=dist.get_rank(), size=2, device=torch.device("cpu"), gather=_gather)
    lengths = {"full": (64, 32, 16), "padded": (61, 30, 1, 15)}
    problems = {
        kind: program.Problem.make(one, 2, world.rank, world.device, program.HEADS, program.GROUPS)
        for kind, one in lengths.items()
    }
    rows: list[dict[str, Any]] = []
    for name in ("a2a", "p2p"):
        attention = program.Attention(name, program.groups_of(name, 2), deterministic=True)
        program.bits(world, name, attention, problems, rows.append)
    program.alternating(world, attention, problems, rows.append)
    assert [row["what"] for row in rows] == ["bits"] * 4 + ["alternating"]
    made = program.figures([{"tp": 2, **row} for row in rows])
    assert (made["comparisons"], made["mismatches"], made["wrong_flags"], made["not_repeatable"]) == (4, 0, 0, 0)
    assert (made["stock_outside_dense"], made["stock_undefined"]) == (0, 0)
    assert all(row["unpatched"] == 0 for row in rows[:4])


@pytest.mark.mpi(2, launcher="torchrun")
def test_undefined_gradients_of_stock_are_told_from_ours(program: Any) -> None:
    """Kernels as cuDNN on Hopper, TE issue #2186: only the ring's dk and dv of the one token, and only without us."""
    world = SimpleNamespace(rank=dist.get_rank(), size=2, device=torch.device("cpu"), gather=_gather)
    lengths = (61, 30, 1, 15)
    problem = program.Problem.make(lengths, 2, world.rank, world.device, program.HEADS, program.GROUPS)
    problems = {"full": problem, "padded": problem}
    rows: list[dict[str, Any]] = []
    STRAY.append(3.0)
    try:
        for name in ("a2a", "p2p"):
            attention = program.Attention(name, program.groups_of(name, 2), deterministic=True)
            program.bits(world, name, attention, {"padded": problem}, rows.append)
        program.alternating(world, attention, problems, rows.append)
    finally:
        STRAY.clear()
    made = program.figures([{"tp": 2, **row} for row in rows])
    elements = 2 * program.GROUPS * problem.q.shape[-1]  # of dk and dv of one token
    assert (made["mismatches"], made["ours_outside_dense"], made["not_repeatable"]) == (0, 0, 0)
    assert (made["stock_outside_dense"], made["stock_undefined"]) == (elements, 1)
    assert rows[1]["stock_wrong"] == 0

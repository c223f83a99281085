# SPDX-License-Identifier: Apache-2.0
"""Random operations on TE's communicators of one capacity, each compared with buffers that TE made for its T.

The operations run once, in their order, on dynamic buffers; then those of each T again on exact ones. All
methods are in it: ring all-gather, pipelined and ring reduce-scatter, bulk, and dgrad with a ring
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

import ub_dynamic as ubd

from .stress import Operation, random_operations
from .te_layers import KINDS, Overlap, collect, fill_parameters, random_tensor
from .te_world import World, quantization_modes, stock_userbuffers, ub_cfgs_with_room

HIDDEN = 512
_RING = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False}
# qkv and proj as TE has them (ring AG, pipeline RS, bulk); the MLP with ring reduce-scatters, dgrad's too
CFGS = {"fc2_fprop": _RING, "fc1_dgrad": _RING}
GATHERS = {"qkv_fprop": "column", "fc1_fprop": "column"}
SCATTERS = {"proj_fprop": "row", "fc2_fprop": "row"}
LAYERS = ("attention", "mlp")

Tensors = dict[str, torch.Tensor]


def lengths(tp: int) -> tuple[int, ...]:
    """The T of the run: from the smallest valid one to the capacity, odd multiples of tp among them."""
    return tuple(tp * rows for rows in (1, 3, 8, 33, 64, 101, 160, 256))


@dataclass(frozen=True)
class Outcome:
    """What a run saw, the worst of all ranks. ``first``: the first operation that differs."""

    operations: int
    mismatches: int
    shape_changes: int
    memory_growth_bytes: int
    first: str


def run(world: World, count: int, seed: int) -> Outcome:
    """``count`` random operations and the backwards that are still owed; both passes on every rank."""
    operations = list(
        random_operations(
            count, seed, lengths(world.size), gathers=list(GATHERS), scatters=list(SCATTERS), layers=LAYERS
        )
    )
    dynamic, changes, growth = _dynamic(world, operations)
    mismatches, first = 0, ""
    for number, wrong in sorted(_exact(world, operations, dynamic).items()):
        if wrong:
            mismatches += 1
            first = first or f"{operations[number]}: {', '.join(wrong)}"
    outcomes = world.gather(Outcome(len(operations), mismatches, changes, growth, first))
    worst = max(outcomes, key=lambda outcome: outcome.mismatches)
    growth = max(outcome.memory_growth_bytes for outcome in outcomes)
    return Outcome(worst.operations, worst.mismatches, worst.shape_changes, growth, worst.first)


def _dynamic(world: World, operations: list[Operation]) -> tuple[dict[int, Tensors], int, int]:
    capacity = lengths(world.size)[-1]
    manager = ubd.initialize_ub(
        [capacity, HIDDEN],
        world.size,
        quantization_modes=quantization_modes(["none"]),
        dtype=torch.bfloat16,
        ub_cfgs=ub_cfgs_with_room(world, CFGS),
        bootstrap_backend="gloo",
        backend="te",
    )
    found: dict[int, Tensors] = {}
    player = _Player(world)
    player.warm_up(manager)
    world.barrier()
    start = requested_bytes()
    for operation in operations:
        if operation.kind == "set_shape":
            manager.set_active_shape([operation.tokens, HIDDEN])
            tokens = {manager.backend.active_tokens(name) for name in manager.backend.specs}  # type: ignore[attr-defined]
            assert tokens == {operation.tokens}, f"{operation}: the communicators have {tokens}"
            found[operation.number] = {}
        else:
            found[operation.number] = player.play(operation, manager)
    world.barrier()
    storages = [tensor.untyped_storage() for tensors in found.values() for tensor in tensors.values()]
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    growth = requested_bytes() - start - sum(kept.values())
    assert manager.active[0] == _last_shape(operations, capacity), f"the active shape ended as {manager.active}"
    ubd.destroy_ub()
    return found, _shape_changes(operations, capacity), growth


def _last_shape(operations: list[Operation], capacity: int) -> int:
    return next((each.tokens for each in reversed(operations) if each.kind == "set_shape"), capacity)


def _shape_changes(operations: list[Operation], active: int) -> int:
    """What else than ``set_shape`` has a T of its own changes to it and back."""
    changes = 0
    for operation in operations:
        other = operation.tokens != active
        changes += other * (1 if operation.kind == "set_shape" else 2)
        active = operation.tokens if operation.kind == "set_shape" else active
    return changes


def requested_bytes() -> int:
    """Bytes that are asked of the allocator and not given back, without its rounding."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # it takes note of what other streams have done with
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def _exact(world: World, operations: list[Operation], found: Mapping[int, Tensors]) -> dict[int, list[str]]:
    wrong: dict[int, list[str]] = {}
    player = None
    for tokens in lengths(world.size):
        with stock_userbuffers(world, [tokens, HIDDEN], ub_cfgs=CFGS):
            player = _Player(world) if player is None else player
            for operation in operations:
                if operation.tokens != tokens or operation.kind == "set_shape":
                    continue
                expected = player.play(operation, None)
                wrong[operation.number] = [
                    name
                    for name in expected.keys() | found[operation.number].keys()
                    if not _same(found[operation.number].get(name), expected.get(name))
                ]
    return wrong


class _Player:
    """The layers, and the forwards that wait for their backward."""

    def __init__(self, world: World) -> None:
        self._world = world
        flags = Overlap("stress", ()).flags()
        ring_dgrad = Overlap("stress", (), dgrad_rs=True).flags()
        self._blocks = {
            "attention": torch.nn.Sequential(
                KINDS["te.Linear column"].build(HIDDEN, world, flags),
                torch.nn.Tanh(),
                Narrow(HIDDEN // world.size),
                KINDS["te.Linear row"].build(HIDDEN, world, flags),
            ),
            "mlp": KINDS["te.LayerNormMLP"].build(HIDDEN, world, ring_dgrad),
        }
        self._single = {name: _single(name, mode, world, flags) for name, mode in (GATHERS | SCATTERS).items()}
        for layer in (*self._blocks.values(), *self._single.values()):
            fill_parameters(layer, world)
        self._waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def warm_up(self, manager: ubd.Manager) -> None:
        """Everything once, so that what is allocated on first use (cuBLAS workspaces) is there."""
        tokens = manager.capacity[0]
        for number, name in enumerate(LAYERS):
            forward = Operation(-1, "forward", tokens, 0, name, -2 - number)
            for kind in ("forward", "backward", "eval"):
                self.play(replace(forward, kind=kind), manager)
        for name in GATHERS | SCATTERS:
            self.play(Operation(-1, "all_gather" if name in GATHERS else "reduce_scatter", tokens, 0, name), manager)

    def play(self, operation: Operation, manager: ubd.Manager | None) -> Tensors:
        """One operation; with ``manager`` on dynamic buffers, else on those that are there."""
        if operation.kind == "backward":
            return self._backward(operation, manager)
        if operation.kind == "forward":
            return self._forward(operation, manager)
        # Collectives alone have nothing that keeps a fast rank from overtaking into the next one.
        self._world.barrier()
        with torch.no_grad():
            if operation.kind == "eval":
                x = self._data(operation, operation.tokens // self._world.size, HIDDEN)
                if manager is None:
                    output = self._blocks[operation.name](x)
                else:
                    with manager.active_shape([operation.tokens, HIDDEN]):
                        output = self._blocks[operation.name](x)
            else:
                rows, columns = operation.tokens, HIDDEN // self._world.size
                if operation.kind == "all_gather":
                    rows, columns = operation.tokens // self._world.size, HIDDEN
                output = self._single[operation.name](self._data(operation, rows, columns))
        self._world.barrier()
        return {"output": output}

    def _forward(self, operation: Operation, manager: ubd.Manager | None) -> Tensors:
        x = self._data(operation, operation.tokens // self._world.size, HIDDEN).requires_grad_()
        if manager is None:
            output = self._blocks[operation.name](x)
        else:
            with manager.microbatch(operation.tokens) as microbatch:
                output = microbatch.bind_backward(self._blocks[operation.name](x))
        self._waiting[operation.microbatch] = x, output
        return {"output": output.detach()}

    def _backward(self, operation: Operation, manager: ubd.Manager | None) -> Tensors:
        x, output = self._waiting.pop(operation.microbatch)
        before = None if manager is None else manager.active
        output.backward(random_tensor(tuple(output.shape), self._world, operation.seed + 7))
        if manager is not None and before is not None:
            assert manager.active[0] == operation.tokens, f"{operation} ran at {manager.active}"
            manager.set_active_shape(before)  # a backward leaves its own T, as it does in a schedule
        found = collect(self._blocks[operation.name], x, output)
        del found["output"]
        return found

    def _data(self, operation: Operation, rows: int, columns: int) -> torch.Tensor:
        return random_tensor((rows, columns), self._world, operation.seed)


class Narrow(torch.nn.Module):
    """The first columns of a column-parallel output, as many as the row-parallel layer takes."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : self.columns].contiguous()


def _single(name: str, mode: str, world: World, flags: Mapping[str, bool]) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    return te.Linear(
        HIDDEN,
        HIDDEN,
        parallel_mode=mode,
        tp_group=world.tp_group,
        ub_name=name.split("_")[0],
        params_dtype=torch.bfloat16,
        device=world.device,
        sequence_parallel=True,
        **flags,
    )


def _same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    return found is not None and expected is not None and torch.equal(found, expected)

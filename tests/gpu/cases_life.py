# SPDX-License-Identifier: Apache-2.0
"""From initialisation to the end and again: no CUDA call, no growth, survivors, graphs, random operations."""

from __future__ import annotations

import torch
from harness import case, expect, expect_raises, userbuffers

import ub_dynamic as ubd
from ub_dynamic.backends.te.graphs import GraphedMicrobatches
from ub_dynamic.testing import te_stress
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, build, collect, differing, random_input, random_tensor, step
from ub_dynamic.testing.te_memory import alternate, cuda_calls, device_bytes, reinitialise, resident_bytes
from ub_dynamic.testing.te_world import World, communicators, poison, stock_userbuffers

HIDDEN, CAPACITY = 512, 1024
OVERLAP = OVERLAPS["default"]


@case()
def a_shape_change_calls_nothing_of_cuda(world: World) -> None:
    with userbuffers(world, CAPACITY, HIDDEN):
        seen = cuda_calls(world, [256, 512, CAPACITY], HIDDEN, 300)
        expect(world, not seen, f"{len(seen)} CUDA events: {sorted(set(seen))[:10]}")


@case()
def a_thousand_shape_changes_take_no_memory(world: World) -> None:
    with userbuffers(world, CAPACITY, HIDDEN):
        alternate(world, [256, 512], HIDDEN, 100)
        allocated, on_device = torch.cuda.memory_allocated(), device_bytes(world)
        regions = {key: communicators()[key].get_buffer().data_ptr() for key in list(communicators())}
        resident = resident_bytes()
        alternate(world, range(world.size, CAPACITY + 1, world.size), HIDDEN, 1000)
        grown = resident_bytes() - resident
        expect(world, grown < 1 << 20, f"the process grew by {grown} bytes")
        expect(world, torch.cuda.memory_allocated() == allocated, "torch allocated")
        expect(world, device_bytes(world) == on_device, "the device has less free memory")
        ubd.reset_ub_active_shape()
        after = {key: communicators()[key].get_buffer().data_ptr() for key in list(communicators())}
        expect(world, after == regions, "a region moved")


@case(limit_s=90)
def initialise_and_destroy_again_and_again(world: World) -> None:
    reinitialise(world, [CAPACITY, HIDDEN], 3, ("none", "fp8"))
    before = device_bytes(world)
    reinitialise(world, [CAPACITY, HIDDEN], 10, ("none", "fp8"))
    grown = device_bytes(world) - before
    expect(world, grown <= 0, f"{grown} bytes of the device are not given back after 10 cycles")
    kind = KINDS["te.LayerNormMLP"]
    with userbuffers(world, CAPACITY, HIDDEN):
        layer = build(kind, OVERLAP, HIDDEN, world)
        ubd.set_ub_active_shape([256, HIDDEN])
        found = step(layer, random_input(kind, 256, HIDDEN, world), world)
    with stock_userbuffers(world, [256, HIDDEN]):
        expected = step(layer, random_input(kind, 256, HIDDEN, world), world)
    expect(world, not differing(found, expected), differing(found, expected))


@case()
def another_shape_after_destroy(world: World) -> None:
    """Capacity and hidden size may differ the next time."""
    kind = KINDS["te.LayerNormMLP"]
    for capacity, hidden in ((CAPACITY, HIDDEN), (CAPACITY // 2, 2 * HIDDEN), (2 * CAPACITY, HIDDEN)):
        with userbuffers(world, capacity, hidden):
            layer = build(kind, OVERLAP, hidden, world)
            expect(world, ubd.get_ub_capacity_shape() == (capacity, hidden), ubd.get_ub_capacity_shape())
            ubd.set_ub_active_shape([capacity // 2, hidden])
            found = step(layer, random_input(kind, capacity // 2, hidden, world), world)
        with stock_userbuffers(world, [capacity // 2, hidden]):
            expected = step(layer, random_input(kind, capacity // 2, hidden, world), world)
        expect(world, not differing(found, expected), differing(found, expected))


@case()
def a_communicator_that_outlives_destroy_harms_nobody(world: World) -> None:
    """Somebody holds one, as a loop variable does; the next set works while it is held and after it is let
    go.
    """
    kind = KINDS["te.LayerNormMLP"]
    with userbuffers(world, CAPACITY, HIDDEN):
        held = next(iter(communicators().values()))
    with userbuffers(world, CAPACITY, HIDDEN):
        layer = build(kind, OVERLAP, HIDDEN, world)
        ubd.set_ub_active_shape([256, HIDDEN])
        first = step(layer, random_input(kind, 256, HIDDEN, world), world)
        world.barrier()
        del held
        second = step(layer, random_input(kind, 256, HIDDEN, world), world)
        world.barrier()
    with stock_userbuffers(world, [256, HIDDEN]):
        expected = step(layer, random_input(kind, 256, HIDDEN, world), world)
    for which, found in (("held", first), ("let go", second)):
        expect(world, not differing(found, expected), f"{which}: {differing(found, expected)}")


@case(limit_s=120)
def random_operations(world: World) -> None:
    outcome = te_stress.run(world, 300, seed=7)
    expect(world, outcome.mismatches == 0, f"{outcome.mismatches} of {outcome.operations} differ: {outcome.first}")
    expect(world, outcome.shape_changes > 50, f"only {outcome.shape_changes} shape changes")
    expect(world, outcome.memory_growth_bytes <= 0, f"{outcome.memory_growth_bytes} bytes more than were kept")


@case(limit_s=120)
def graphs_replay_bitwise_while_other_shapes_are_active(world: World) -> None:
    lengths = [256, CAPACITY, 8 * world.size]
    for name in ("te.LayerNormMLP", "te.Linear row"):
        kind = KINDS[name]
        with userbuffers(world, CAPACITY, HIDDEN) as manager:
            layer = build(kind, OVERLAP, HIDDEN, world)
            eager = {}
            for tokens in lengths:
                poison(world)
                with manager.active_shape([tokens, HIDDEN]):
                    eager[tokens] = step(layer, random_input(kind, tokens, HIDDEN, world), world)
            graphed = GraphedMicrobatches(layer, manager)
            for turn in range(4):
                for tokens in lengths if turn % 2 else reversed(lengths):
                    world.barrier()
                    manager.set_active_shape([lengths[turn % 3], HIDDEN])
                    leaf = random_input(kind, tokens, HIDDEN, world).requires_grad_()
                    output = graphed(tokens, leaf)
                    output.backward(random_tensor(tuple(output.shape), world, 5 * output.numel() + 3))
                    wrong = differing(collect(layer, leaf, output.clone()), eager[tokens])
                    expect(world, not wrong, f"{name}, T = {tokens}, turn {turn}: {wrong}")
            expect(world, graphed.captures == len(lengths), f"{graphed.captures} captures")
            world.barrier()
            graphed.clear()


@case()
def the_shape_does_not_change_during_a_capture(world: World) -> None:
    kind = KINDS["te.LayerNormMLP"]
    with userbuffers(world, CAPACITY, HIDDEN) as manager:
        layer = build(kind, OVERLAP, HIDDEN, world)
        manager.set_active_shape([256, HIDDEN])
        operand = random_input(kind, 256, HIDDEN, world)
        expected = layer(operand.requires_grad_()).detach().clone()  # overlaps only where there is a gradient
        world.barrier()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(operand)
        torch.cuda.current_stream().wait_stream(stream)
        world.barrier()
        problem = ""
        with torch.cuda.graph(graph):
            manager.set_active_shape([256, HIDDEN])  # the same shape is no change
            try:
                manager.set_active_shape([512, HIDDEN])
                problem = "nothing was raised"
            except ubd.UBStateError as error:
                wanted = ("before the capture", "one graph per shape")
                problem = "" if all(part in str(error) for part in wanted) else str(error)
            output = layer(operand)
        expect(world, not problem, problem)
        manager.set_active_shape([512, HIDDEN])
        graph.replay()
        world.barrier()
        expect(world, torch.equal(output, expected), "the replay differs while another shape is active")
        # graph memory is freed before the communicators are
        del output
        graph.reset()
        expect_raises(world, ubd.UBShapeError, ["256"], lambda: layer(operand))

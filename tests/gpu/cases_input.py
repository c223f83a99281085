# SPDX-License-Identifier: Apache-2.0
"""Bad input on the device: exception, text, and a state that stays as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from harness import case, expect, expect_raises, userbuffers

import ub_dynamic as ubd
from ub_dynamic.testing.te_layers import KINDS, OVERLAPS, build, differing, random_input, step
from ub_dynamic.testing.te_world import World, communicators, quantization_modes, stock_userbuffers

HIDDEN, CAPACITY = 512, 1024
T = 256


@case()
def calls_before_and_after_are_state_errors(world: World) -> None:
    def all_of_them() -> None:
        for call in (
            lambda: ubd.set_ub_active_shape([T, HIDDEN]),
            ubd.get_ub_active_shape,
            ubd.reset_ub_active_shape,
            ubd.token_multiple,
        ):
            expect_raises(world, ubd.UBStateError, ["call initialize_ub first"], call)

    all_of_them()
    with userbuffers(world, CAPACITY, HIDDEN):
        twice = ["already initialised"]
        expect_raises(world, ubd.UBStateError, twice, lambda: ubd.initialize_ub([CAPACITY, HIDDEN], world.size))
        expect(world, ubd.get_ub_active_shape() == (CAPACITY, HIDDEN), ubd.get_ub_active_shape())
    all_of_them()
    ubd.destroy_ub()  # a second time is nothing


@case()
def shapes_that_are_none_leave_the_state_alone(world: World) -> None:
    tp = world.size
    on_device = torch.tensor(T, device=world.device)
    rows = (
        ([T], ubd.UBShapeError, ["2-D [tokens, hidden]", str(T)]),
        ([T, HIDDEN, 1], ubd.UBShapeError, ["2-D [tokens, hidden]"]),
        (T, ubd.UBShapeError, ["2-D [tokens, hidden]"]),
        ("ab", ubd.UBShapeError, ["2-D [tokens, hidden]"]),
        ([T + 0.5, HIDDEN], ubd.UBShapeError, ["2-D [tokens, hidden]", f"{T + 0.5}"]),
        ([True, HIDDEN], ubd.UBShapeError, ["2-D [tokens, hidden]", "True"]),
        ([on_device, HIDDEN], ubd.UBShapeError, ["cuda", "synchronise"]),
        ([0, HIDDEN], ubd.UBShapeError, ["must be positive", "skip the microbatch on all TP ranks"]),
        ([-T, HIDDEN], ubd.UBShapeError, ["must be positive", str(-T)]),
        ([T, 0], ubd.UBShapeError, ["positive"]),
        ([CAPACITY + tp, HIDDEN], ubd.UBCapacityError, [str(CAPACITY + tp), str(CAPACITY)]),
        ([T, HIDDEN + 8], ubd.UBShapeError, ["hidden size is fixed at init", str(HIDDEN)]),
        ([T + 1, HIDDEN], ubd.UBAlignmentError, [str(T + 1), f"tp = {tp}", str(T + tp)]),
    )
    kind = KINDS["te.LayerNormMLP"]
    with stock_userbuffers(world, [T, HIDDEN]):
        layer = build(kind, OVERLAPS["default"], HIDDEN, world)
        expected = step(layer, random_input(kind, T, HIDDEN, world), world)
    with userbuffers(world, CAPACITY, HIDDEN) as manager:
        ubd.set_ub_active_shape([T, HIDDEN])
        for shape, kind_of_error, parts in rows:
            expect_raises(world, kind_of_error, parts, lambda: ubd.set_ub_active_shape(shape))  # noqa: B023
            expect(world, ubd.get_ub_active_shape() == (T, HIDDEN), f"{shape} changed the active shape")
            tokens = {manager.backend.active_tokens(name) for name in manager.backend.specs}
            expect(world, tokens == {T}, f"{shape} changed a communicator: {tokens}")
        wrong = differing(step(layer, random_input(kind, T, HIDDEN, world), world), expected)
        expect(world, not wrong, f"after the errors: {wrong}")


@case()
def alignment_names_rule_and_next_valid_value(world: World) -> None:
    """H = 1032 with a ring reduce-scatter: c must be a multiple of 32, so T of 4 * tp."""
    hidden, tp = 1032, world.size
    with userbuffers(world, 64 * tp, hidden, OVERLAPS["ring_rs"]):
        expect(world, ubd.token_multiple() == 4 * tp, ubd.token_multiple())
        expect(world, ubd.round_up_tokens(tp) == 4 * tp, ubd.round_up_tokens(tp))
        parts = ["proj_fprop", "32", str(tp), str(4 * tp)]
        expect_raises(world, ubd.UBAlignmentError, parts, lambda: ubd.set_ub_active_shape([tp, hidden]))
        expect(world, ubd.get_ub_active_shape() == (64 * tp, hidden), "changed")
        ubd.set_ub_active_shape([4 * tp, hidden])


@case()
def what_no_kernel_takes_is_refused_at_initialisation(world: World) -> None:
    """The pipeline's H rule, offsets beyond 32 bits, a mode named twice: an error, and TE can start again."""

    def start(shape: list[int], **options: object) -> None:
        ubd.initialize_ub(
            shape, world.size, **{"quantization_modes": quantization_modes(["none"]), "backend": "te", **options}
        )

    # the smallest shape whose ring reduce-scatter has an offset of 2^31 bytes
    overflow = -(-(2**31) * world.size // (4096 * 2 * (2 * world.size - 2)) // world.size) * world.size
    ring = {"ub_cfgs": dict(OVERLAPS["ring_rs"].ub_cfgs or {})}
    rows = (
        ([64, 1040 + 8], {}, ubd.UBAlignmentError, ["1048", "32", "1056"]),
        ([overflow, 4096], ring, ubd.UBCapacityError, ["int offset overflow", "limit"]),
        ([64, HIDDEN], {"quantization_modes": quantization_modes(["none", "none"])}, ValueError, ["twice"]),
        ([64, HIDDEN], {"ub_cfgs": {"no_such": {}}}, ubd.UBShapeError, ["no_such"]),
        ([64, HIDDEN], {"check": "sometimes"}, ubd.UBStateError, ["sometimes"]),
        ([64 + 1, HIDDEN], {}, ubd.UBAlignmentError, ["65"]),
    )
    for shape, options, kind, parts in rows:
        expect_raises(world, kind, parts, lambda: start(shape, **options), f"{shape} {options}")  # noqa: B023
        expect(world, not ubd.is_ub_initialized(), f"{shape} {options} left it initialised")
        expect(world, not communicators(), f"{shape} {options} left communicators of TE")
    with userbuffers(world, CAPACITY, HIDDEN):
        ubd.set_ub_active_shape([T, HIDDEN])


@case()
def communicators_that_stay_at_capacity_say_why(world: World) -> None:
    with userbuffers(world, CAPACITY, HIDDEN) as manager:
        report = ubd.set_ub_active_shape([T, HIDDEN])
        expect(world, set(report.skipped) == {"proj_wgrad", "fc2_wgrad"}, dict(report.skipped))
        expect(world, len(report.updated) == 10, report.updated)
        parts = ["proj_wgrad", "external"]
        expect_raises(
            world, ubd.UBUnsupportedError, parts, lambda: ubd.set_buffer_active_shape("proj_wgrad", [T, HIDDEN])
        )
        expect_raises(world, ubd.UBStateError, ["no_such"], lambda: ubd.get_buffer_active_shape("no_such"))
        ubd.set_buffer_active_shape("qkv_fprop", [2 * T, HIDDEN])
        expect(world, ubd.get_buffer_active_shape("qkv_fprop") == (2 * T, HIDDEN), "one communicator was not set")
        expect(world, ubd.get_buffer_active_shape("fc1_fprop") == (T, HIDDEN), "another one was set too")
        ubd.set_ub_active_shape([T, HIDDEN])
        expect(world, manager.backend.active_tokens("qkv_fprop") == T, "it kept a shape of its own")


@case()
def half_precision_buffers_stay_at_capacity(world: World) -> None:
    """TE's reduce-scatter kernels compute in bfloat16 whatever the dtype says."""
    with userbuffers(world, CAPACITY, HIDDEN, dtype=torch.float16):
        ubd.set_ub_active_shape([CAPACITY, HIDDEN])  # what is registered is what TE does by itself
        expect_raises(world, ubd.UBUnsupportedError, ["bfloat16"], lambda: ubd.set_ub_active_shape([T, HIDDEN]))
        expect(world, ubd.get_ub_active_shape() == (CAPACITY, HIDDEN), ubd.get_ub_active_shape())


@case()
def ranks_that_differ_are_told_all_of_them(world: World) -> None:
    """Strict: at once, with every rank's T, the shape unchanged. Deferred: by the next change at the latest."""
    mine = T + world.size * (world.rank + 1)
    everyone = [str(T + world.size * (rank + 1)) for rank in range(world.size)]
    with _disagreeing(world, check="strict"):
        ubd.set_ub_active_shape([T, HIDDEN])
        expect_raises(world, ubd.UBRankMismatchError, everyone, lambda: ubd.set_ub_active_shape([mine, HIDDEN]))
        expect(world, ubd.get_ub_active_shape() == (T, HIDDEN), ubd.get_ub_active_shape())
    with _disagreeing(world, check="deferred"):
        ubd.set_ub_active_shape([T, HIDDEN])
        raised = ""
        for tokens in (mine, 2 * T):
            try:
                ubd.set_ub_active_shape([tokens, HIDDEN])
            except ubd.UBRankMismatchError as error:
                raised = raised or str(error)
            world.barrier()
        named = [tokens for tokens in everyone if tokens in raised]
        expect(world, str(mine) in named and len(named) > 1, f"deferred said: {raised or 'nothing'}")


@case()
def a_rank_that_skips_a_call_is_found(world: World) -> None:
    with _disagreeing(world, check="strict", timeout=2.0):
        ubd.set_ub_active_shape([T, HIDDEN])
        world.barrier()
        problem = ""
        if world.rank:
            try:
                ubd.set_ub_active_shape([2 * T, HIDDEN])
                problem = "nothing was raised"
            except ubd.UBTimeoutError as error:
                problem = "" if "[0]" in str(error) else str(error)
        expect(world, not problem, problem)


@contextlib.contextmanager
def _disagreeing(world: World, **options: Any) -> Iterator[None]:
    """UserBuffers whose end says again that the ranks disagreed."""
    modes = quantization_modes(["none"])
    ubd.initialize_ub([CAPACITY, HIDDEN], world.size, quantization_modes=modes, backend="te", **options)
    try:
        yield
    finally:
        with contextlib.suppress(ubd.UBRankMismatchError, ubd.UBTimeoutError):
            ubd.destroy_ub()
    expect(world, not ubd.is_ub_initialized(), "still initialised")

# SPDX-License-Identifier: Apache-2.0
"""Which token counts Transformer Engine's UserBuffers kernels compute correctly: a table of rules.

The rules follow from the index arithmetic of ``userbuffers.cu`` and ``comm_gemm_overlap.cpp``. The C
asserts that would state some of them are compiled out of release wheels, so a broken rule is not an
error there but a dropped tail, a misplaced row or no communication at all. They are kept apart from
what a layout itself needs (:mod:`ub_dynamic.shapes`): the host backend could take more, but checks
them too, so that a script moves to GPUs unchanged.

=============================  ==================================================================
communicator                   rule (b bytes an element, N = T*H, c = N/tp)
=============================  ==================================================================
every one                      0 < T <= T_cap, T % tp == 0: all that overlaps without UserBuffers (cuBLASMp) need
bulk AG, RS                    c*b % 16 == 0 (16-byte lines), N*b >= 128, N*b < 2^32, tp in 2..32
pipeline RS                    H*b % (16*num_splits) == 0, N*b/num_splits >= 128, N*b < 2^32, tp in 2..32
ring AG, copy engines          c*b*(tp-1) < 2^31 (32-bit byte offsets)
ring AG, SM copies             c*b % 16 == 0, num_sm == 1, c*b*(tp-1) < 2^31
ring RS                        c % 32 == 0, c*b*(2*tp-2) < 2^31
whose kernels take num_sm      1 <= num_sm <= 32: all but rings with copy engines
=============================  ==================================================================
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from .errors import UBAlignmentError, UBCapacityError, UBShapeError
from .shapes import CommSpec

KERNEL_TP_SIZES = (2, 4, 8, 16, 32)  # the collective kernels are instantiated for these only
INT32_LIMIT = 2**31
_MAX_SMS = 32  # blocks that the kernels count (NVTE_MAX_SMS); with more they signal before the last one is done
_LINE_BYTES = 16  # an int4 load
_REDUCE_ELEMENTS = 32  # elements a thread of the ring reduction takes
_MINIMUM_BYTES = 128  # collectives on fewer than 64 two-byte elements return without communicating


@dataclass(frozen=True)
class TokenRule:
    """The valid T: multiples of ``multiple`` from ``minimum`` to ``maximum``, both included."""

    multiple: int
    minimum: int
    maximum: int

    def accepts(self, tokens: int) -> bool:
        return self.minimum <= tokens <= self.maximum and tokens % self.multiple == 0

    def round_up(self, tokens: int) -> int:
        """The smallest valid T that is at least ``tokens``; :class:`UBCapacityError` if there is none."""
        rounded = max(-(-tokens // self.multiple) * self.multiple, self.minimum)
        if rounded > self.maximum:
            raise UBCapacityError(
                f"T = {tokens} rounds up to {rounded} (multiple of {self.multiple}), but at most "
                f"{self.maximum} tokens are possible"
            )
        return rounded


def even_rule(capacity: int, tp: int) -> TokenRule:
    """The T that ``tp`` ranks can share evenly."""
    return TokenRule(tp, tp, capacity // tp * tp)


def combine(rules: Iterable[TokenRule], capacity: int) -> TokenRule:
    """The T that every rule accepts; without rules (tp = 1) every T up to ``capacity``."""
    multiple, minimum, maximum = 1, 1, capacity
    for rule in rules:
        multiple = math.lcm(multiple, rule.multiple)
        minimum, maximum = max(minimum, rule.minimum), min(maximum, rule.maximum)
    return TokenRule(multiple, -(-minimum // multiple) * multiple, maximum // multiple * multiple)


def token_rule(spec: CommSpec) -> TokenRule:
    """The token counts that are correct for one communicator (module docstring: table and source)."""
    hidden, tp = spec.capacity[1], spec.tp
    unit = _local_unit(spec)
    multiple = tp * (unit // math.gcd(hidden, unit))
    minimum = max(1, -(-_minimum_numel(spec) // hidden))
    maximum = min(spec.capacity[0], _offset_limit(spec))
    return TokenRule(multiple, -(-minimum // multiple) * multiple, maximum // multiple * multiple)


def check_spec(spec: CommSpec) -> None:
    """The rules that do not depend on T, checked once when a communicator is made.

    Raises :class:`UBShapeError` or :class:`UBAlignmentError`; SM copies of a ring with more than one SM
    get a warning, since a receiver can then run ahead of its sender.
    """
    where = f"{spec.name} ({spec.method} {spec.collective})"
    if spec.method in ("bulk", "pipeline") and spec.tp not in KERNEL_TP_SIZES:
        valid = next((tp for tp in KERNEL_TP_SIZES if tp >= spec.tp), KERNEL_TP_SIZES[-1])
        raise UBShapeError(
            f"{where}: tp = {spec.tp}, but its kernels exist for tp in {KERNEL_TP_SIZES} only and would launch "
            f"nothing; the next valid tp is {valid}"
        )
    for count, setting in ((spec.num_splits, "num_splits"), (spec.num_sm, "num_sm")):
        if count < 1:
            raise UBShapeError(f"{where}: {setting} = {count} must be at least 1; the next valid value is 1")
    if _kernels_take_sms(spec) and spec.num_sm > _MAX_SMS:
        raise UBShapeError(
            f"{where}: num_sm = {spec.num_sm}, but TE's kernels take at most {_MAX_SMS}; the next valid value is "
            f"{_MAX_SMS}"
        )
    hidden, line = spec.capacity[1], _LINE_BYTES // kernel_itemsize(spec.dtype)
    if spec.method == "pipeline" and hidden % (line * spec.num_splits):
        raise UBAlignmentError(
            f"{where}: H = {hidden} must be a multiple of {line} * num_splits = {line * spec.num_splits}; "
            f"the next valid H is {_round_up(hidden, line * spec.num_splits)}"
        )
    if spec.method != "ring_exchange":
        return
    if spec.aggregate and spec.tp % 2:
        raise UBShapeError(
            f"{where}: aggregate pairs ranks, so tp = {spec.tp} must be even; the next valid tp is {spec.tp + 1}"
        )
    if not spec.use_ce and spec.num_sm & (spec.num_sm - 1):
        raise UBAlignmentError(
            f"{where}: use_ce = 0 with num_sm = {spec.num_sm} writes past the chunk; num_sm must be 1"
        )
    if not spec.use_ce and spec.num_sm != 1:
        warnings.warn(
            f"{where}: use_ce = 0 with num_sm = {spec.num_sm} can let a receiver run ahead of its sender; "
            "use num_sm = 1",
            stacklevel=3,
        )


def check_capacity(specs: Iterable[CommSpec]) -> None:
    """Raise unless each communicator works at its whole capacity; the text names the rule and the next valid one."""
    following = [spec for spec in specs if spec.method != "external"]
    unbounded = [replace(spec, capacity=(INT32_LIMIT, spec.capacity[1])) for spec in following]
    for spec, free in zip(following, unbounded, strict=True):
        tokens, hidden = spec.capacity
        try:
            check_tokens(free, tokens)
        except UBShapeError as error:
            rule = combine(map(token_rule, unbounded), INT32_LIMIT)
            try:
                valid = f"the next valid capacity is [{rule.round_up(tokens)}, {hidden}]"
            except UBCapacityError:
                valid = f"the largest valid capacity is [{rule.maximum}, {hidden}]"
            raise type(error)(f"capacity [{tokens}, {hidden}]: {error}; {valid}") from None


def check_even(where: str, tokens: int, capacity: int, tp: int, rule: TokenRule | None = None) -> None:
    """Raise unless 0 < T <= ``capacity`` and T % tp == 0; the text begins with ``where`` and names value, rule and next
    valid T, that of ``rule`` if there is more to heed."""
    rule = rule or even_rule(capacity, tp)
    if tokens < 1:
        raise UBShapeError(f"{where}: T = {tokens} must be positive; {_next_valid(rule, 1)}")
    if tokens > capacity:
        raise UBCapacityError(
            f"{where}: T = {tokens} tokens exceed the capacity of {capacity} tokens; {_next_valid(rule, tokens)}"
        )
    if tokens % tp:
        raise UBAlignmentError(f"{where}: T = {tokens} is not a multiple of tp = {tp}; {_next_valid(rule, tokens)}")


def check_tokens(spec: CommSpec, tokens: int) -> None:
    """Raise unless ``tokens`` is valid for this communicator; the text names value, rule and next valid T."""
    hidden, tp, rule = spec.capacity[1], spec.tp, token_rule(spec)
    where = f"{spec.name} ({spec.method} {spec.collective})"
    check_even(where, tokens, spec.capacity[0], tp, rule)
    limit = _offset_limit(spec)
    if tokens > limit:
        raise UBCapacityError(
            f"{where}: T = {tokens} with H = {hidden} makes a TE int offset overflow (32-bit offsets); "
            f"the limit is {limit} tokens"
        )
    unit = _local_unit(spec)
    local = tokens // tp * hidden
    if local % unit:
        raise UBAlignmentError(
            f"{where}: T/tp * H = {local} elements a rank must be a multiple of {unit} (T = {tokens}, tp = {tp}, "
            f"H = {hidden}); {_next_valid(rule, tokens)}"
        )
    if tokens * hidden < _minimum_numel(spec):
        raise UBAlignmentError(
            f"{where}: T*H = {tokens * hidden} elements, but its kernel moves nothing below "
            f"{_minimum_numel(spec)} elements; {_next_valid(rule, tokens)}"
        )


def _next_valid(rule: TokenRule, tokens: int) -> str:
    try:
        return f"the next valid T is {rule.round_up(tokens)}"
    except UBCapacityError:
        return f"no larger T fits; the largest valid T is {rule.maximum}"


def kernel_itemsize(dtype: torch.dtype) -> int:
    """Bytes an element as TE's kernels see it: 1 for FP8 (uint8) buffers, else BF16's 2, also for the
    float32 that only the host backend takes (so that a script's shapes stay valid on a GPU)."""
    return 1 if dtype.itemsize == 1 else 2


def _kernels_take_sms(spec: CommSpec) -> bool:
    return spec.method in ("bulk", "pipeline") or (spec.method == "ring_exchange" and not spec.use_ce)


def _local_unit(spec: CommSpec) -> int:
    """c must be a multiple of this many elements."""
    if spec.method == "ring_exchange":
        if spec.collective == "rs":
            return _REDUCE_ELEMENTS
        if spec.use_ce:
            return 1
    return _LINE_BYTES // kernel_itemsize(spec.dtype)


def _minimum_numel(spec: CommSpec) -> int:
    if spec.method == "ring_exchange":
        return 1
    splits = spec.num_splits if spec.method == "pipeline" else 1
    return _MINIMUM_BYTES // kernel_itemsize(spec.dtype) * splits


def _offset_limit(spec: CommSpec) -> int:
    """The largest T before a 32-bit offset overflows; not rounded to a multiple."""
    hidden, tp, size = spec.capacity[1], spec.tp, kernel_itemsize(spec.dtype)
    if spec.method == "ring_exchange":
        steps = 2 * tp - 2 if spec.collective == "rs" else tp - 1
        # T/tp * H * size * steps <= 2^31 - 1
        return (INT32_LIMIT - 1) * tp // (hidden * size * steps) if steps else spec.capacity[0]
    return (INT32_LIMIT - 1) * 2 // (hidden * size)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

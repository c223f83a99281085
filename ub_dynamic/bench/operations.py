# SPDX-License-Identifier: Apache-2.0
"""The GEMMs of a transformer layer that overlap with a collective: names, sizes, and one of them as a thing to time.

======================  =======================================  =========================================
GEMM                    what runs                                shape of the GEMM on a rank [M, K] x [K, N]
======================  =======================================  =========================================
qkv_fprop, fc1_fprop    all-gather of the input, GEMM            [T, H] x [H, 3H/tp or ffn/tp]
proj_fprop, fc2_fprop   GEMM, reduce-scatter of the output       [T, H/tp or ffn/tp] x [.., H]
qkv_dgrad, fc1_dgrad    the backward: dgrad with its             [T, 3H/tp or ffn/tp] x [.., H], and wgrad
                        reduce-scatter, wgrad with the
                        all-gather of the input
proj_dgrad, fc2_dgrad   the backward: all-gather of the output's [T, H] x [H, H/tp or ffn/tp], and wgrad
                        gradient, dgrad, wgrad
======================  =======================================  =========================================

The operation runs through the layer that training uses (``te.Linear`` or the host's), so its host time counts. The
limit of each is the same layer without tensor parallelism, with the weight's shard and all T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import UBShapeError

LayerName = Literal["qkv", "proj", "fc1", "fc2"]
LAYERS: tuple[LayerName, ...] = ("fc1", "fc2", "qkv", "proj")
COLUMN = ("qkv", "fc1")


@dataclass(frozen=True)
class Gemm:
    """One GEMM by TE's communicator name; ``layer`` and ``backward`` follow from it."""

    layer: LayerName
    backward: bool

    @property
    def name(self) -> str:
        return f"{self.layer}_{'dgrad' if self.backward else 'fprop'}"

    @property
    def column(self) -> bool:
        """Column-parallel: the forward gathers; a row-parallel one reduce-scatters."""
        return self.layer in COLUMN

    @property
    def operation(self) -> str:
        """In words, for a table."""
        if self.backward:
            return "bulk or dgrad+RS, wgrad" if self.column else "AG+dgrad, wgrad"
        return "AG+GEMM" if self.column else "GEMM+RS"

    def features(self, hidden: int, ffn: int) -> tuple[int, int]:
        """``(in, out)`` of the whole layer."""
        return {"qkv": (hidden, 3 * hidden), "proj": (hidden, hidden), "fc1": (hidden, ffn), "fc2": (ffn, hidden)}[
            self.layer
        ]

    def local_features(self, hidden: int, ffn: int, tp: int) -> tuple[int, int]:
        """``(in, out)`` of one rank's shard of the layer."""
        before, after = self.features(hidden, ffn)
        return (before, after // tp) if self.column else (before // tp, after)

    def local_rows(self, tokens: int, tp: int) -> tuple[int, int]:
        """Rows of ``(input, output)`` of the layer on one rank."""
        return (tokens // tp, tokens) if self.column else (tokens, tokens // tp)

    def flops(self, tokens: int, hidden: int, ffn: int, tp: int) -> float:
        """Of one rank, the wgrad GEMM of a backward included."""
        before, after = self.features(hidden, ffn)
        return (4.0 if self.backward else 2.0) * tokens * before * after / tp


# The most important first: what is cut off when the time is over stands at the end.
GEMMS: dict[str, Gemm] = {
    gemm.name: gemm
    for gemm in (
        *(Gemm(layer, False) for layer in LAYERS),
        *(Gemm(layer, True) for layer in LAYERS),
    )
}


def check_sizes(hidden: int, ffn: int, tp: int) -> None:
    """Raise :class:`UBShapeError` unless every layer can be cut for ``tp`` ranks."""
    for name, value in (("hidden", hidden), ("ffn", ffn)):
        if value < 1 or value % tp:
            raise UBShapeError(
                f"{name} = {value} must be a positive multiple of tp = {tp}; the next valid value is "
                f"{max(-(-value // tp), 1) * tp}"
            )


def buckets(first: int, last: int, multiple: int) -> tuple[int, ...]:
    """Powers of two from ``first`` to ``last`` and both ends, each rounded up to ``multiple`` (the last one down)."""
    if not 0 < first <= last:
        raise UBShapeError(f"tokens {first}:{last}: the first must be positive and at most the last")
    if last < multiple:
        raise UBShapeError(f"tokens {first}:{last}: no multiple of {multiple} is that small; the next is {multiple}")
    powers = [1 << bit for bit in range(last.bit_length()) if first < 1 << bit < last]
    largest = last // multiple * multiple
    rounded = {min(-(-tokens // multiple) * multiple, largest) for tokens in (first, *powers, last)}
    return tuple(sorted(rounded))


def any_method_multiple(hidden: int, tp: int) -> int:
    """T that is a multiple of this suits every method: a ring reduce-scatter takes T/tp * H in 32 elements."""
    return tp * (32 // math.gcd(hidden, 32))

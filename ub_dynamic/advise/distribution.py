# SPDX-License-Identifier: Apache-2.0
"""How often each value occurs: all that is kept of ten million lengths or microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Integers = np.ndarray  # one dimension, int64


@dataclass(frozen=True)
class Distribution:
    """``counts[i]`` times ``values[i]``; the values ascend."""

    values: Integers
    counts: Integers

    @classmethod
    def of(cls, counted: Mapping[int, int]) -> Distribution:
        """From a mapping of value to count."""
        values = np.fromiter(counted.keys(), np.int64, len(counted))
        counts = np.fromiter(counted.values(), np.int64, len(counted))
        order = np.argsort(values)
        return cls(values[order], counts[order])

    def mapped(self, values: Integers) -> Distribution:
        """The same with ``values[i]`` in the place of its value i; equal ones are counted together."""
        merged, where = np.unique(values, return_inverse=True)
        counts = np.zeros(len(merged), np.int64)
        np.add.at(counts, where, self.counts)
        return Distribution(merged, counts)

    def __len__(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def total(self) -> int:
        """The sum over all."""
        return int(self.values @ self.counts)

    @property
    def mean(self) -> float:
        return self.total / len(self)

    @property
    def largest(self) -> int:
        return int(self.values[-1])

    def quantile(self, share: float) -> int:
        """The smallest value that at least ``share`` of all do not exceed: numpy's method ``inverted_cdf``."""
        reached = np.cumsum(self.counts)
        return int(self.values[np.searchsorted(reached, share * reached[-1] * (1 - 1e-12))])


class Counting:
    """Counts arrays of values, one after the other."""

    def __init__(self) -> None:
        self.counted: dict[int, int] = {}

    def add(self, values: Integers) -> None:
        distinct, counts = np.unique(values, return_counts=True)
        self.add_pairs(zip(distinct.tolist(), counts.tolist(), strict=True))

    def add_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        counted = self.counted
        for value, count in pairs:
            counted[value] = counted.get(value, 0) + count

    def distribution(self) -> Distribution:
        return Distribution.of(self.counted)

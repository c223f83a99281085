# SPDX-License-Identifier: Apache-2.0
"""A few shapes for all microbatches: where the borders of buckets cost the fewest tokens.

Microbatches of T tokens are padded to the next border. The best borders are values of T that occur, the largest among
them. With n different T in ascending order, C_i microbatches among the first i and ``cost_k[i]`` the fewest tokens for
those with k borders, ``cost_k[j] = min over i < j of cost_{k-1}[i] + T_j * (C_j - C_i)``: lines of slope -C_i looked up
at the ascending T_j, so that one pass over a queue of their lower envelope fills a row. Exact, in O(n) a border.
"""

from __future__ import annotations

import numpy as np

from .distribution import Distribution, Integers


def best_borders(tokens: Distribution, buckets: int) -> list[int]:
    """The ascending borders of at most ``buckets`` buckets whose padded microbatches have the fewest tokens."""
    values = tokens.values.tolist()
    if buckets >= len(values):
        return [int(value) for value in values]
    before = [0, *np.cumsum(tokens.counts).tolist()]
    cost: list[float] = [0] + [float("inf")] * len(values)
    chosen = []
    for _ in range(buckets):
        cost, best = _one_more(cost, values, before)
        chosen.append(best)
    borders = []
    end = len(values)
    for best in reversed(chosen):
        if end:
            borders.append(int(values[end - 1]))
            end = best[end]
    return borders[::-1]


def _one_more(cost: list[float], values: list[int], before: list[int]) -> tuple[list[float], list[int]]:
    """The costs with one border more, and where the last bucket begins."""
    fewest: list[float] = [0]
    begins = [0]
    queue: list[tuple[int, float, int]] = []  # (slope, intercept, i) of the lower envelope, slopes falling
    head = 0
    for j, value in enumerate(values, 1):
        if cost[j - 1] != float("inf"):
            line = (-before[j - 1], cost[j - 1], j - 1)
            while len(queue) - head >= 2 and _hidden(queue[-2], queue[-1], line):
                queue.pop()
            queue.append(line)
        while len(queue) - head >= 2 and _at(queue[head + 1], value) <= _at(queue[head], value):
            head += 1
        if len(queue) > head:
            fewest.append(_at(queue[head], value) + value * before[j])
            begins.append(queue[head][2])
        else:
            fewest.append(float("inf"))
            begins.append(0)
    return fewest, begins


def _at(line: tuple[int, float, int], value: int) -> float:
    return line[0] * value + line[1]


def _hidden(first: tuple[int, float, int], middle: tuple[int, float, int], last: tuple[int, float, int]) -> bool:
    """Whether ``middle`` is nowhere below both others; the slopes fall from first to last."""
    return (last[1] - first[1]) * (first[0] - middle[0]) <= (middle[1] - first[1]) * (first[0] - last[0])


def padded_to(tokens: Distribution, borders: Integers) -> Distribution:
    """Each T at the smallest of the ascending ``borders`` that holds it."""
    return tokens.mapped(borders[np.searchsorted(borders, tokens.values)])

# SPDX-License-Identifier: Apache-2.0
"""Document lengths: four distributions with published statistics, and the microbatches that lengths make.

Each is a log-normal that reproduces the published numbers named here. The sources publish no shape: the log-normal, and
its sigma of 1 where a source gives a mean alone, are assumptions of this module, as are 4 bytes a token where a source
counts bytes. ``--file`` takes the lengths of a real job instead (:mod:`ub_dynamic.advise.reading`). Lengths are cropped
to the capacity.

==============  =====================================================================================================
name            published statistics that it reproduces
==============  =====================================================================================================
openwebtext     9,035,582,198 + 4,434,897 GPT-2 tokens of 8,013,769 documents: mean 1,128 (nanoGPT,
                ``data/openwebtext/readme.md``)
stackexchange   mean document 2.16 KiB (The Pile, arXiv:2101.00027, table 1): 553 tokens
arxiv           mean document 46.61 KiB (the same table): 11,932 tokens
longalign       10,000 instructions of 8k to 64k tokens (LongAlign, arXiv:2401.18058): the central 98 %
==============  =====================================================================================================
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..planning import plan_fixed_count, plan_microbatches


@dataclass(frozen=True)
class LogNormal:
    """``median`` tokens; the logarithm has the standard deviation ``sigma``."""

    median: float
    sigma: float

    @classmethod
    def of_mean(cls, mean: float, sigma: float) -> LogNormal:
        """The one with this mean: ``mean = median * exp(sigma^2 / 2)``."""
        return cls(mean / math.exp(sigma**2 / 2), sigma)

    @classmethod
    def of_range(cls, low: float, high: float, quantile: float = 2.326) -> LogNormal:
        """The one whose central 98 % lie between ``low`` and ``high``."""
        return cls(math.sqrt(low * high), math.log(high / low) / (2 * quantile))

    def draw(self, count: int, seed: int) -> list[int]:
        """``count`` lengths, the same on every rank and every machine."""
        rng = random.Random(seed)
        return [max(1, round(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0)))) for _ in range(count)]


_BYTES_A_TOKEN = 4.0

DISTRIBUTIONS: dict[str, LogNormal] = {
    "openwebtext": LogNormal.of_mean((9_035_582_198 + 4_434_897) / 8_013_769, 1.0),
    "stackexchange": LogNormal.of_mean(2.16 * 1024 / _BYTES_A_TOKEN, 1.0),
    "arxiv": LogNormal.of_mean(46.61 * 1024 / _BYTES_A_TOKEN, 1.0),
    "longalign": LogNormal.of_range(8 * 1024, 64 * 1024),
}


def microbatches(
    lengths: Sequence[int], capacity: int, tp: int, *, multiple: int = 1, documents: int | None = None
) -> list[int]:
    """T of every microbatch: ``documents`` each, in order, or packed under ``capacity`` where it is None.

    With ``documents`` a microbatch is cropped to the capacity, as a job crops its documents. ``multiple``: T is
    rounded up to it (:func:`ub_dynamic.token_multiple`).
    """
    cropped = [min(length, capacity) for length in lengths]
    if documents is None:
        found = plan_microbatches(cropped, capacity, tp=tp).tokens
    else:
        found = plan_fixed_count(cropped, documents, tp=tp).tokens
    largest = capacity // multiple * multiple
    return [min(-(-tokens // multiple) * multiple, largest) for tokens in found]

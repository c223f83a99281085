# SPDX-License-Identifier: Apache-2.0
"""The mode of a measurement: where its ranks ran, in the words of result files and tuning tables.

``"cpu-mpi"``: on CPUs; ``"one-gpu-N-ranks"``: N ranks share one GPU; ``"N-gpus"``: one rank a GPU.
"""

from __future__ import annotations

import re

CPU_MPI = "cpu-mpi"
WORDS = "'cpu-mpi', 'one-gpu-N-ranks' or 'N-gpus', as in 'one-gpu-4-ranks'"
_MODE = re.compile(r"cpu-mpi|one-gpu-(?P<sharing>[1-9]\d*)-ranks|(?P<apart>[1-9]\d*)-gpus")


def gpu_mode(ranks: int, *, shared: bool) -> str:
    """``ranks`` ranks on one GPU, or each on its own."""
    return f"one-gpu-{ranks}-ranks" if shared else f"{ranks}-gpus"


def is_mode(mode: str) -> bool:
    """Whether ``mode`` is one of the three."""
    return _MODE.fullmatch(mode) is not None


def ranks_on_one_gpu(mode: str) -> int:
    """How many ranks are on one GPU together; 0 in the other modes."""
    return _number(mode, "sharing")


def ranks_apart(mode: str) -> int:
    """How many ranks have a GPU each; 0 in the other modes."""
    return _number(mode, "apart")


def shares_gpu(mode: str) -> bool:
    """Whether several ranks share one GPU."""
    return ranks_on_one_gpu(mode) > 1


def _number(mode: str, group: str) -> int:
    found = _MODE.fullmatch(mode)
    return int(found[group] or 0) if found is not None else 0

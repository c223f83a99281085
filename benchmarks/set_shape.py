# SPDX-License-Identifier: Apache-2.0
"""What set_ub_active_shape costs on 12 host communicators, another T each time. Writes host_set_shape.json.

One pass measures the time of each call, a second one the memory that Python and the communicators hold before
and after as many calls.

python benchmarks/set_shape.py --calls 1000000
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Sequence

import _host_ranks
import numpy as np

import ub_dynamic as ubd
from ub_dynamic.backends.host.buffers import allocated_bytes
from ub_dynamic.groups import Group
from ub_dynamic.testing.results import write_result

TP, CAPACITY, HIDDEN = 2, 4096, 256
# TE's names make ten communicators that follow the shape and two of method "external" that do not; here all
# follow
CFGS = {"proj_wgrad": {"method": "bulk"}, "fc2_wgrad": {"method": "bulk"}}
_BATCH = 500  # calls between two barriers: free-running ranks would be further apart than training ever lets them


def shapes() -> Sequence[tuple[int, int]]:
    """Every T once in a fixed random order, never the same one twice in a row."""
    tokens = np.random.default_rng(0).permutation(np.arange(TP, CAPACITY + 1, TP))
    return [(int(value), HIDDEN) for value in tokens]


def measure(group: Group, calls: int) -> dict[str, float]:
    manager = ubd.initialize_ub((CAPACITY, HIDDEN), TP, backend="host", ub_cfgs=CFGS)
    every = shapes()
    registered = allocated_bytes()
    nanoseconds = np.zeros(calls, dtype=np.int64)  # written once here, so that filling it allocates nothing
    _call(group, every, calls, nanoseconds)
    microseconds = nanoseconds / 1e3
    _call(group, every, _BATCH, None)
    gc.collect()
    tracemalloc.start()
    _call(group, every, _BATCH, None)
    held = np.zeros(2, dtype=np.int64)  # filled in place: a number kept in between would count too
    held[0] = tracemalloc.get_traced_memory()[0]
    _call(group, every, calls, None)
    held[1] = tracemalloc.get_traced_memory()[0]
    growth = int(held[1] - held[0]) + allocated_bytes() - registered
    result = {
        "set_shape_median_us": float(np.median(microseconds)),
        "set_shape_p99_us": float(np.percentile(microseconds, 99)),
        "set_shape_mean_us": float(microseconds.mean()),
        "allocated_bytes_growth": growth,
        "communicators": len(manager.backend.specs),
        "calls": calls,
    }
    tracemalloc.stop()
    ubd.destroy_ub()
    return result


def _call(group: Group, every: Sequence[tuple[int, int]], calls: int, nanoseconds: np.ndarray | None) -> None:
    """``calls`` changes of shape, each with the time it took. Ends where it began, at the last of ``every``."""
    set_shape, now = ubd.set_ub_active_shape, time.perf_counter_ns
    set_shape(every[-1])
    for first in range(0, calls, _BATCH):
        group.barrier("staying together")
        for call in range(first, min(first + _BATCH, calls)):
            shape = every[call % len(every)]
            begin = now()
            set_shape(shape)
            end = now()
            if nanoseconds is not None:
                nanoseconds[call] = end - begin
    set_shape(every[-1])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--calls", type=int, default=1_000_000)
    options.add_argument("--tp", type=int, default=TP, help=argparse.SUPPRESS)
    calls = options.parse_args().calls
    if _host_ranks.is_rank():
        _host_ranks.answer(TP, lambda group: measure(group, calls))
        return 0
    figures = _host_ranks.ask(__file__, TP, ["--calls", str(calls)], timeout=1200)
    for key, value in figures.items():
        print(f"{key}: {value:g}")
    write_result("host_set_shape", figures, mode="cpu-mpi")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""Cost of one shape change over TE's twelve communicators. Writes te_set_shape.json.

python benchmarks/te_set_shape.py --tp 2 4
"""

from __future__ import annotations

import _one_gpu

from ub_dynamic.bench import set_shape

figures = set_shape.te_figures

if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=180)
    options.add_argument("--timed", type=int, default=100_000, help="changes that are timed one by one")
    options.add_argument("--calls", type=int, default=1_000_000, help="changes between two looks at memory")
    measure = _one_gpu.measuring(set_shape.measure, timings=True)
    raise SystemExit(_one_gpu.main("te_set_shape", options.parse_args(), measure, figures))

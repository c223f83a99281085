# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs, one a shape, replayed in any order, another shape set before each. Writes te_graphs.json.

python benchmarks/te_graphs.py --tp 2 4
"""

from __future__ import annotations

import _one_gpu

from ub_dynamic.bench import graphs

figures = graphs.figures

if __name__ == "__main__":
    options = _one_gpu.parser(__doc__, timeout=150)
    options.add_argument("--replays", type=int, default=60, help="for each layer")
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--capacity", type=int, default=2048)
    options.add_argument("--seed", type=int, default=20261130)
    raise SystemExit(_one_gpu.main("te_graphs", options.parse_args(), _one_gpu.measuring(graphs.measure), figures))

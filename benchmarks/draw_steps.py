# SPDX-License-Identifier: Apache-2.0
"""Draw step time against T from a result file of te_step.py or `bench tp-step`.

python benchmarks/draw_steps.py                           # te_step, into the pictures that the pages show
python benchmarks/draw_steps.py RESULT --out steps.svg    # any other, to a .png, .svg or .pdf file
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import matplotlib

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "te_step.json"
SHOWN = (HERE / "results" / "te_step.png", HERE.parent / "docs" / "pictures" / "te_step.svg")

os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same picture gives the same file
matplotlib.rcParams.update({"svg.hashsalt": "ub_dynamic", "svg.fonttype": "none"})

from ub_dynamic.bench import step_curves  # noqa: E402
from ub_dynamic.modes import shares_gpu  # noqa: E402


def title(result: dict[str, Any]) -> str:
    """Where it was measured, and when. A file of several starts has the mode of one of them."""
    mode, machine = result["mode"], result["machine"].split("; ")[-1]
    where = "ranks that share one GPU" if shares_gpu(mode) else mode
    return f"A training step against T\n{where}, {machine}, {result['date'][:10]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", nargs="?", type=Path, default=RESULT)
    parser.add_argument("--out", type=Path, nargs="+", default=SHOWN, help="pictures to write")
    options = parser.parse_args(arguments)
    if options.result != RESULT and options.out is SHOWN:
        parser.error("--out is needed: the pages show te_step")
    result = json.loads(options.result.read_text())
    for path in options.out:
        step_curves.draw(result["rows"], title(result), path)
        print(f"Written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

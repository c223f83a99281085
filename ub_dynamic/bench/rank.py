# SPDX-License-Identifier: Apache-2.0
"""One rank of a measurement: ``python -m ub_dynamic.bench.rank job.json``, started by :mod:`ub_dynamic.bench.start`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .benches import BENCHES
from .report import Report
from .start import EVENTS
from .worlds import open_world


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    bench = BENCHES[job["bench"]]
    with open_world(job["backend"], job["mode"]) as world:
        if world.rank:
            bench.measure(world, job["options"], Report(None))
            return
        with open(os.environ[EVENTS], "a") as file:
            bench.measure(world, job["options"], Report(file))


if __name__ == "__main__":
    main(sys.argv[1])

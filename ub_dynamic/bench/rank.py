# SPDX-License-Identifier: Apache-2.0
"""One rank of a measurement: ``python -m ub_dynamic.bench.rank job.json``, started by :mod:`ub_dynamic.bench.start`."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from .benches import BENCHES
from .report import Report
from .start import EVENTS
from .worlds import open_world


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    bench = BENCHES[job["bench"]]
    with open_world(job["backend"], job["mode"]) as world:
        gc.collect()
        gc.freeze()  # what was imported stays; a collection between rounds then takes a millisecond
        if world.rank:
            bench.measure(world, job["options"], Report())
            return
        with open(os.environ[EVENTS], "a", buffering=1) as file:
            bench.measure(world, job["options"], Report(lambda event: _write(file, event)))


def _write(file: TextIO, event: Mapping[str, Any]) -> None:
    file.write(json.dumps(event) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

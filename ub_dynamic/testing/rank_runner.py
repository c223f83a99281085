# SPDX-License-Identifier: Apache-2.0
"""What one rank runs for `mpi_plugin`: the tests of its start, in order, each reported to a file as it ends.

The file holds one JSON object a line: {"test": node id, "event": "begin" | "report" | "end", ...}. On SIGUSR1
the rank says on stderr where it stands.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ub_dynamic.ranks import discover

RUN_DIR = "UB_DYNAMIC_RANK_TESTS"  # the folder of the start; set in the ranks only
TESTS_FILE = "tests.json"


def reports_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


class Reporter:
    """pytest plugin of one rank: appends what happens to its file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._write(item.nodeid, "begin", pid=os.getpid())
        result = yield
        self._write(item.nodeid, "end")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write(report.nodeid, "report", report=data)

    def _write(self, test: str, event: str, **more: Any) -> None:
        self._file.write(json.dumps({"test": test, "event": event, **more}) + "\n")


def main() -> int:
    folder, rank = Path(os.environ[RUN_DIR]), discover().rank
    tests: list[str] = json.loads((folder / TESTS_FILE).read_text())
    stderr = os.fdopen(os.dup(2), "w")  # pytest redirects descriptor 2 while a test runs
    faulthandler.register(signal.SIGUSR1, file=stderr)
    options = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    options += ["-o", "timeout=0", f"--basetemp={folder / f'tmp{rank}'}", f"--rootdir={Path.cwd()}"]
    pytest.main([*options, *tests], plugins=[Reporter(reports_file(folder, rank))])
    return 0  # failures are in the reports; another code would make the launcher end the other ranks


if __name__ == "__main__":
    raise SystemExit(main())

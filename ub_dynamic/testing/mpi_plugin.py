# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: `@pytest.mark.mpi(2, 4)` runs a test's body in every one of 2, then 4 real processes.

Plain `pytest` collects as usual. All marked tests of one file with the same number of ranks share one start
of the launcher, in which every rank runs them in the same order with pytest itself (so fixtures, parameters
and assertion texts are those of any other test) and writes its reports to a file, which is read here as it
grows. A test passes when it passes on every rank. One that fails, dies or outlives its timeout ends its
start; the tests behind it get a fresh one.

Fixtures: `mpi_size` (number of ranks), `mpi_comm` (a communicator of the test's own), `ranks_tmp_path` (one
folder for all ranks; `tmp_path` is one for each).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from .launch import Launcher, mpi_missing, start_ranks, tail
from .rank_runner import RUN_DIR, TESTS_FILE, reports_file

if TYPE_CHECKING:
    from mpi4py import MPI

_START_S = 120.0  # what the launcher and the imports may take
_GRACE_S = 5.0  # what the other ranks may take to end a test that has failed on one
_POLL_S = 0.02


@dataclass(frozen=True)
class RankMark:
    """What `@pytest.mark.mpi(*sizes, launcher="mpirun", timeout=120)` says about one item."""

    size: int
    launcher: Launcher
    timeout: float

    def shares_start(self, other: RankMark) -> bool:
        return (self.size, self.launcher) == (other.size, other.launcher)


def rank_mark(item: pytest.Item) -> RankMark | None:
    mark = item.get_closest_marker("mpi")
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if mark is None or "mpi_size" not in params:
        return None
    return RankMark(params["mpi_size"], **{"launcher": "mpirun", "timeout": 120.0, **mark.kwargs})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("mpi")
    if mark is None or not mark.args:
        return  # a bare `mpi` is a label: such a test calls run_ranks itself
    if "mpi_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("mpi_size")
    metafunc.parametrize("mpi_size", mark.args, ids=[f"{size}-ranks" for size in mark.args])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that share a start next to each other; all else keeps its order."""
    files: dict[Path, int] = {}
    for item in items:
        files.setdefault(item.path, len(files))

    def place(item: pytest.Item) -> tuple[int, str, int]:
        mark = rank_mark(item)
        return (files[item.path], mark.launcher, mark.size) if mark else (files[item.path], "", 0)

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Report what the ranks say about `item` instead of running it here."""
    mark = rank_mark(item)
    if mark is None or RUN_DIR in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, mark):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What an ordinary test of this file has set up here ends with the file, whatever kind its last test is.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    _close(session)


@pytest.fixture
def mpi_comm() -> Iterator[MPI.Comm]:
    """A communicator over all ranks of the test, of its own: a duplicate of COMM_WORLD, freed afterwards."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture
def ranks_tmp_path(request: pytest.FixtureRequest) -> Path:
    """A folder that all ranks of the test share; it goes when the start ends."""
    folder = Path(os.environ[RUN_DIR], f"shared{request.session.items.index(request.node)}")
    folder.mkdir(exist_ok=True)
    return folder


# ---- one start of the launcher -----------------------------------------------------------------------------


@dataclass
class RankLog:
    """What one rank has written about one test so far."""

    pid: int | None = None  # known once it has begun
    ended: bool = False
    reports: list[pytest.TestReport] = field(default_factory=list)

    @property
    def failure(self) -> pytest.TestReport | None:
        return next((report for report in self.reports if report.failed), None)


class Start:
    """One start of the launcher, and the tests that it still owes a result."""

    def __init__(self, tests: list[str], mark: RankMark, config: pytest.Config) -> None:
        self.size = mark.size
        self.owed = set(tests)
        self._config = config
        self._dir = tempfile.TemporaryDirectory(prefix="ub_dynamic_ranks_")
        self._folder = Path(self._dir.name)
        self._read = [0] * self.size
        self._logs = {test: [RankLog() for _ in range(self.size)] for test in tests}
        (self._folder / TESTS_FILE).write_text(json.dumps(tests))
        self._run = start_ranks(
            "ub_dynamic.testing.rank_runner",
            self.size,
            launcher=mark.launcher,
            env={RUN_DIR: str(self._folder)},
            cwd=config.rootpath,
        )

    def close(self) -> None:
        self._run.close()
        self._dir.cleanup()

    def wait(self, test: str, timeout: float) -> tuple[list[RankLog], str]:
        """Wait until every rank has ended `test`; their logs, and why it did not come to that (else "")."""
        self.owed.discard(test)
        logs = self._logs[test]
        deadline = time.monotonic() + _START_S + timeout
        begun = failed = False
        while True:
            running = self._run.running  # asked before reading: what a rank wrote last is still read
            self._poll()
            now = time.monotonic()
            if all(log.ended for log in logs):
                return logs, ""
            if not running:
                return logs, "not ended, the launcher has"
            if not begun and any(log.pid for log in logs):
                begun, deadline = True, now + timeout
            if not failed and any(log.failure for log in logs):
                failed, deadline = True, min(deadline, now + _GRACE_S)
            if now > deadline:
                self._ask_where(logs)
                limit = f"{_GRACE_S:g} s after another rank failed" if failed else f"{timeout:g} s"
                return logs, f"not ended after {limit}" if begun else "no rank came to it"
            time.sleep(_POLL_S)

    def _ask_where(self, logs: list[RankLog]) -> None:
        """Make the ranks that have not ended the test write their stack to stderr."""
        for log in logs:
            if log.pid and not log.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(log.pid, signal.SIGUSR1)
        time.sleep(1.0)  # for the text to come through the launcher

    def output(self) -> str:
        """The end of what launcher and ranks have said outside of tests."""
        return f"--- stdout\n{tail(self._run.stdout(), 20)}\n--- stderr\n{tail(self._run.stderr(), 60)}"

    def _poll(self) -> None:
        """Read what the ranks have appended to their files, whole lines only."""
        for rank in range(self.size):
            path = reports_file(self._folder, rank)
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(data)
            for line in data.splitlines():
                self._record(rank, json.loads(line))

    def _record(self, rank: int, event: dict[str, Any]) -> None:
        log = self._logs[event["test"]][rank]
        if event["event"] == "report":
            hook = self._config.hook.pytest_report_from_serializable
            report = hook(config=self._config, data=event["report"])
            if report.skipped and isinstance(report.longrepr, list):  # JSON has no tuples, pytest wants one
                report.longrepr = tuple(report.longrepr)
            log.reports.append(report)
        elif event["event"] == "begin":
            log.pid = event["pid"]
        else:
            log.ended = True


_START: pytest.StashKey[Start] = pytest.StashKey()


def _close(session: pytest.Session) -> None:
    if _START in session.stash:
        session.stash[_START].close()
        del session.stash[_START]


def _reports(item: pytest.Item, mark: RankMark) -> list[pytest.TestReport]:
    """What the ordinary process reports about `item`."""
    missing = mpi_missing() if mark.launcher == "mpirun" else None
    if missing:
        return [_report(item, "skipped", (str(item.path), item.location[1] or 0, f"Skipped: {missing}"))]
    session = item.session
    if _START not in session.stash or item.nodeid not in session.stash[_START].owed:
        _close(session)
        session.stash[_START] = Start(_batch(item, mark), mark, item.config)
    start = session.stash[_START]
    logs, wrong = start.wait(item.nodeid, mark.timeout)
    if not wrong and not any(log.failure for log in logs):
        return logs[0].reports
    report = _failure(item, logs, wrong, start)
    _close(session)
    return [report]


def _batch(item: pytest.Item, mark: RankMark) -> list[str]:
    """`item` and the tests right behind it that can share its start."""
    items = item.session.items
    batch: list[str] = []
    for other in items[items.index(item) :]:
        theirs = rank_mark(other)
        if other.path != item.path or theirs is None or not mark.shares_start(theirs):
            break
        batch.append(other.nodeid)
    return batch


def _failure(item: pytest.Item, logs: list[RankLog], wrong: str, start: Start) -> pytest.TestReport:
    """One report for all ranks: the first failure with its own text, else how the start went wrong."""
    states = [
        f"rank {rank}: {'failed' if log.failure else 'ended' if log.ended else wrong or 'not ended'}"
        for rank, log in enumerate(logs)
    ]
    summary = "\n".join(states)
    first = next((log.failure for log in logs if log.failure), None)
    if first is not None:
        first.sections.insert(0, (f"{len(logs)} ranks", summary))
        return first
    return _report(item, "failed", f"{summary}\n{start.output()}")


def _report(item: pytest.Item, outcome: Literal["failed", "skipped"], longrepr: Any) -> pytest.TestReport:
    keywords: dict[str, Literal[1]] = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, longrepr, "call")

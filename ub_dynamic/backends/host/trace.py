# SPDX-License-Identifier: Apache-2.0
"""What ran when: GEMMs and transfers of each rank, and how much of the transfers the GEMMs hid.

Off until :func:`start`; while it is off an operation pays one test of a global for it. The file is Chrome's
trace format (chrome://tracing, https://ui.perfetto.dev): a process per rank, a track for GEMMs and one for
transfers. Ranks of one host share the clock, so their events line up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...groups import Group
from ...input_file import check_input

GEMM, TRANSFER, WAIT = "GEMM", "transfer", "wait"
_TRACKS = (GEMM, TRANSFER, WAIT)
_MOST_RANKS = 65536  # of a file that is read


class Span(NamedTuple):
    """``name`` ran on ``track`` from ``start_ns`` to ``end_ns`` (monotonic clock); a transfer sent ``nbytes``."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    nbytes: int = 0


class Tracer:
    """The spans of one rank. Appending to a list is safe from both threads."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, track: str, name: str, start_ns: int, nbytes: int = 0) -> None:
        """A span that ends now."""
        self.spans.append(Span(track, name, start_ns, time.monotonic_ns(), nbytes))


_active: Tracer | None = None
now = time.monotonic_ns


def start() -> Tracer:
    """Record from now on, in a new :class:`Tracer`."""
    global _active
    _active = Tracer()
    return _active


def stop() -> Tracer | None:
    """Record no more; what was recorded, or None if nothing was."""
    global _active
    ended, _active = _active, None
    return ended


def active() -> Tracer | None:
    """The tracer that records now, or None."""
    return _active


def hidden_fraction(spans: Iterable[Span]) -> float:
    """The part of the time with a transfer under way in which a GEMM ran too; 1.0 without any transfer.

    A transfer lasts from its start on this rank to its end, so waiting for a late peer counts.
    """
    spans = list(spans)
    transfers = _union([span for span in spans if span.track == TRANSFER])
    total = sum(end - begin for begin, end in transfers)
    if not total:
        return 1.0
    return _overlap(transfers, _union([span for span in spans if span.track == GEMM])) / total


def busy_seconds(spans: Iterable[Span], track: str) -> float:
    """Seconds in which something ran on ``track``."""
    return sum(end - begin for begin, end in _union([span for span in spans if span.track == track])) * 1e-9


def save(path: str | Path, spans_by_rank: Sequence[Sequence[Span]]) -> None:
    """Write a Chrome trace with one process per rank."""
    events: list[dict[str, object]] = []
    for rank, spans in enumerate(spans_by_rank):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.extend(
            {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": track}}
            for tid, track in enumerate(_TRACKS)
        )
        events.extend(_event(rank, span) for span in spans)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def load(path: str | Path) -> list[list[Span]]:
    """The spans of each rank in a file of :func:`save`. ValueError for any other file, :class:`UBUnsupportedError` for
    what is neither a regular file nor a pipe.
    """
    check_input(Path(path))
    try:
        events = [event for event in json.loads(Path(path).read_text())["traceEvents"] if event["ph"] == "X"]
        spans = [(_rank(event["pid"]), _span(event)) for event in events]
    except (AttributeError, OverflowError, RecursionError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no trace of the host backend: {error!r}") from error
    ranks: list[list[Span]] = [[] for _ in range(1 + max((rank for rank, _ in spans), default=-1))]
    for rank, span in spans:
        ranks[rank].append(span)
    return ranks


def _rank(pid: Any) -> int:
    if type(pid) is not int or not 0 <= pid < _MOST_RANKS:
        raise ValueError(f"pid = {pid!r}: it is a rank, an int from 0 to {_MOST_RANKS - 1}")
    return pid


def _span(event: Mapping[str, Any]) -> Span:
    begin, duration = (round(1000 * event[name]) for name in ("ts", "dur"))  # infinity and NaN have no integer
    if duration < 0:
        raise ValueError(f"dur = {event['dur']!r}: a span does not end before it begins")
    return Span(event["cat"], event["name"], begin, begin + duration, event.get("args", {}).get("bytes", 0))


def gather_and_save(path: str | Path, tracer: Tracer, group: Group) -> float:
    """Write the spans of all ranks of ``group`` (on its first rank); the mean hidden fraction. Collective.

    Raises :class:`~ub_dynamic.errors.UBTimeoutError` if a rank does not come.
    """
    everyone = [[Span(*span) for span in spans] for spans in _gather(tracer, group)]
    if group.rank == 0:
        save(path, everyone)
    return sum(map(hidden_fraction, everyone)) / len(everyone)


_BATCH = 4000  # spans a message: a group's messages are small


def _gather(tracer: Tracer, group: Group) -> list[list[tuple[str, str, int, int, int]]]:
    own = [tuple(span) for span in tracer.spans]
    rounds = max(group.allgather(-(-len(own) // _BATCH), "counting trace spans"))
    everyone: list[list[tuple[str, str, int, int, int]]] = [[] for _ in range(group.size)]
    for i in range(rounds):
        part = own[i * _BATCH : (i + 1) * _BATCH]
        for rank, spans in enumerate(group.allgather(part, "collecting trace spans")):
            everyone[rank].extend(spans)
    return everyone


def _event(rank: int, span: Span) -> dict[str, object]:
    event: dict[str, object] = {
        "ph": "X",
        "pid": rank,
        "tid": _TRACKS.index(span.track),
        "name": span.name,
        "cat": span.track,
        "ts": span.start_ns / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
    }
    if span.nbytes:
        event["args"] = {"bytes": span.nbytes}
    return event


def _union(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Disjoint intervals, in order, that cover the same time."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted((span.start_ns, span.end_ns) for span in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _overlap(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    """Length of the time that is in both."""
    total = i = j = 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total

# SPDX-License-Identifier: Apache-2.0
"""The tuning table as it grows: saved after every cell, so that a run that ends early can be taken up again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import UBUnsupportedError
from ..output_file import check_output
from ..testing.results import command_line
from ..tuning_table import FORMAT, TuningRow, TuningTable, these_versions, this_machine

_MUST_MATCH = ("machine", "versions", "tp", "hidden", "ffn", "dtype", "mode")


def header(tp: int, hidden: int, ffn: int, dtype: str, mode: str) -> dict[str, Any]:
    """What the rows of a run hold for."""
    return {
        "machine": this_machine(),
        "versions": these_versions(),
        "tp": tp,
        "hidden": hidden,
        "ffn": ffn,
        "dtype": dtype,
        "mode": mode,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
    }


def _check_writable(path: Path) -> None:
    """Before anything is measured; makes the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UBUnsupportedError(f"{path} cannot be written: {error}") from None
    check_output(path)


def _lock(path: Path) -> FileLock:
    """That this process alone fills ``path``."""
    target = Path(os.path.realpath(path))
    lock = FileLock(target.with_name(f".{hashlib.sha256(target.name.encode()).hexdigest()[:16]}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UBUnsupportedError(f"{path} is being filled by another tune: wait for it, or name another file") from None
    except OSError as error:
        raise UBUnsupportedError(f"{path} cannot be filled: its lock: {error}") from None
    return lock


class GrowingTable:
    """``path`` with the rows that it has already, and those of this run.

    For a ``with`` statement: until its end no other process fills the file. :class:`UBUnsupportedError` for a file that
    another one fills, that cannot be written, is no table, or has a header that differs from ``facts``: it is not
    overwritten then, unless ``restart``.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], restart: bool = False) -> None:
        self.path, self._facts = path, dict(facts)
        self._rows: dict[tuple[str, int], dict[str, Any]] = {}
        _check_writable(path)
        self._lock = _lock(path)
        try:
            if path.exists() and not restart:
                for row in self._matching(TuningTable.load(path)).to_json()["rows"]:
                    self._rows[row["gemm"], row["tokens"]] = row
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> GrowingTable:
        return self

    def __exit__(self, *_: object) -> None:
        self._unlock()

    def _unlock(self) -> None:
        Path(self._lock.lock_file).unlink(missing_ok=True)  # while it is held: who comes next makes a new one
        self._lock.release()

    def _matching(self, old: TuningTable) -> TuningTable:
        differs = [
            f"{name} is {getattr(old, name)}, here {self._facts[name]}"
            for name in _MUST_MATCH
            if getattr(old, name) != self._facts[name]
        ]
        if differs:
            raise UBUnsupportedError(
                f"{self.path} exists and was measured elsewhere: {'; '.join(differs)}. Name another file, or --restart"
            )
        return old

    @property
    def done(self) -> list[tuple[str, int]]:
        """The GEMM and T of every cell that was measured, not only filled with the default."""
        return [cell for cell, row in self._rows.items() if row["candidates"]]

    def take(self, row: Mapping[str, Any]) -> None:
        """Add the row of a cell, or replace an older one, and save."""
        self._rows[row["gemm"], row["tokens"]] = dict(row)
        self.table.save(self.path)

    @property
    def table(self) -> TuningTable:
        """All rows, by GEMM and T."""
        rows = [self._rows[cell] for cell in sorted(self._rows)]
        return TuningTable.from_json({"format": FORMAT, **self._facts, "rows": rows})


def best_of(row: TuningRow) -> dict[str, float]:
    """Per method its fastest candidate in microseconds."""
    found: dict[str, float] = {}
    for candidate in row.candidates:
        method = candidate.config.method
        found[method] = min(found.get(method, candidate.median_us), candidate.median_us)
    return found


def chosen_us(row: TuningRow) -> float | None:
    """The median of the configuration that was chosen; None where nothing was measured."""
    return next((each.median_us for each in row.candidates if each.config == row.chosen), None)


def default_us(row: TuningRow) -> float | None:
    """That of the default, which is the first candidate."""
    return row.candidates[0].median_us if row.candidates else None


def gains(rows: Sequence[TuningRow]) -> dict[str, float]:
    """How many cells were measured and how many leave the default, and the best and mean time over the default's."""
    pairs = [(chosen_us(row), default_us(row)) for row in rows]
    ratios = [mine / other for mine, other in pairs if mine is not None and other]
    changed = sum(row.chosen != row.candidates[0].config for row in rows if row.candidates)
    made: dict[str, float] = {"cells": len(rows), "measured": len(ratios), "changed": changed}
    if ratios:
        made |= {"over_default_min": min(ratios), "over_default_mean": sum(ratios) / len(ratios)}
    return made

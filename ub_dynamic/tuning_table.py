# SPDX-License-Identifier: Apache-2.0
"""The file in which a tuner writes down which overlap is best for each GEMM at each measured T, and where that holds.

One JSON object, written at once or not at all::

    {"format": "ub_dynamic tuning table 1", "machine": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "tp": 2,
     "hidden": 4096, "ffn": 16384, "dtype": "bfloat16", "mode": "2-gpus", "date": "...", "command": "...",
     "rows": [{"gemm": "fc2_fprop", "tokens": 2048, "chosen": {"method": "pipeline", "num_sm": 8}, "reason": "...",
               "gemm_us": 410.0, "candidates": [{"config": {...}, "median_us": 433.1, "spread_us": 2.0}]}]}
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .backends.names import check_choices
from .errors import UBShapeError, UBUnsupportedError, shown
from .input_file import check_input
from .json_fields import Fields, check_time, check_whole
from .modes import WORDS, is_mode
from .output_file import write_whole
from .overlap import OverlapConfig
from .policy import Choice, Policy

FORMAT = "ub_dynamic tuning table 1"
FORCE_VARIABLE = "UB_DYNAMIC_FORCE_TABLE"
_PACKAGES = ("torch", "transformer_engine")
logger = logging.getLogger("ub_dynamic")


@dataclass(frozen=True)
class Candidate:
    """One measured configuration: the median of its times, and their spread, both in microseconds.

    Raises :class:`UBShapeError` for times that are no times.
    """

    config: OverlapConfig
    median_us: float
    spread_us: float

    def __post_init__(self) -> None:
        _check_config("config", self.config)
        check_time("median_us", self.median_us)
        check_time("spread_us", self.spread_us, zero=True)


@dataclass(frozen=True)
class TuningRow:
    """One GEMM at one T: what was ``chosen``, why, and what it was chosen from.

    ``gemm``: TE's communicator name (``"fc2_fprop"``). ``gemm_us``: the plain GEMM without any communication, the
    limit of what an overlap can reach; None where it was not measured. Raises :class:`UBShapeError` for a T or a time
    that is none.
    """

    gemm: str
    tokens: int
    chosen: OverlapConfig
    reason: str
    candidates: tuple[Candidate, ...] = ()
    gemm_us: float | None = None

    def __post_init__(self) -> None:
        check_whole("tokens", self.tokens)
        _check_config("chosen", self.chosen)
        if self.gemm_us is not None:
            check_time("gemm_us", self.gemm_us)


@dataclass(frozen=True)
class TuningTable:
    """``rows``, and what they hold for: :meth:`check_fits` compares ``machine`` (:func:`this_machine`), ``versions``
    (:func:`these_versions`), ``tp``, ``hidden``, ``dtype`` (``"bfloat16"``) and ``mode`` (``"cpu-mpi"``,
    ``"one-gpu-N-ranks"`` or ``"N-gpus"``).

    ``forced``: use it elsewhere all the same. Raises :class:`UBShapeError` for no row at all and for two rows of one
    GEMM at one T.
    """

    machine: str
    versions: Mapping[str, str]
    tp: int
    hidden: int
    ffn: int
    dtype: str
    mode: str
    date: str
    command: str
    rows: tuple[TuningRow, ...]
    forced: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not self.rows:
            raise UBShapeError("rows = []: a tuning table has at least one row")
        seen = set()
        for row in self.rows:
            if (row.gemm, row.tokens) in seen:
                raise UBShapeError(f"a tuning table has two rows for {row.gemm} at T = {row.tokens}")
            seen.add((row.gemm, row.tokens))

    def policy(self) -> Policy:
        """The policy of these rows: a T between two measured ones is treated as the one that is nearer in log scale
        (the border of 1024 and 4096 is 2048, and a T on the border is of the smaller one); below the smallest and
        above the largest measured T, as these."""
        measured: dict[str, list[TuningRow]] = {}
        for row in sorted(self.rows, key=lambda row: row.tokens):
            measured.setdefault(row.gemm, []).append(row)
        begins: dict[int, dict[str, Choice]] = {}
        for gemm, rows in measured.items():
            for before, row in zip([None, *rows], rows, strict=False):
                start = 1 if before is None else math.isqrt(before.tokens * row.tokens) + 1
                begins.setdefault(start, {})[gemm] = Choice(row.chosen, row.reason)
        starts, stages = sorted(begins), []
        standing: dict[str, Choice] = {}
        for start in starts:
            standing = {**standing, **begins[start]}
            stages.append(MappingProxyType(standing))
        return Policy(tuple(starts), tuple(stages))

    def check_fits(
        self,
        *,
        tp: int,
        hidden: int,
        dtype: str,
        ffn: int | None = None,
        mode: str | None = None,
        machine: str | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Raise :class:`UBUnsupportedError`, naming what differs, unless the table was measured for this.

        ``machine`` and ``versions`` are by default those of this process; of versions the first number counts.
        ``ffn`` and ``mode`` are compared where they are known. A table that is forced, by ``load(path, force=True)`` or
        UB_DYNAMIC_FORCE_TABLE=1, is logged instead.
        """
        here = {
            "machine": this_machine() if machine is None else machine,
            "tp": tp,
            "hidden": hidden,
            "dtype": dtype,
            **{name: value for name, value in (("ffn", ffn), ("mode", mode)) if value is not None},
        }
        table = {name: getattr(self, name) for name in here}
        differs = [f"{name} is {table[name]}, here {here[name]}" for name in here if table[name] != here[name]]
        for name, version in (these_versions() if versions is None else versions).items():
            theirs = self.versions.get(name, version)
            if theirs.partition(".")[0] != version.partition(".")[0]:
                differs.append(f"{name} is {theirs}, here {version}")
        if not differs:
            return
        if self.forced or os.environ.get(FORCE_VARIABLE) == "1":
            logger.warning("a tuning table is used though it was measured elsewhere: %s", "; ".join(differs))
            return
        raise UBUnsupportedError(
            f"the tuning table was measured elsewhere: {'; '.join(differs)}. Tune here (python -m ub_dynamic tune), or "
            f"use it all the same: policy=TuningTable.load(path, force=True), {FORCE_VARIABLE}=1, or --force"
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, whole or not at all; returns its path. :class:`UBUnsupportedError` where it cannot be."""
        write_whole(Path(path), json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, force: bool = False) -> TuningTable:
        """The table in ``path``. :class:`UBUnsupportedError` says what is wrong with the file."""
        check_input(Path(path))
        try:
            return replace(cls.from_json(json.loads(Path(path).read_text())), forced=force)
        except OSError as error:
            raise UBUnsupportedError(f"the tuning table {path} cannot be read: {error}") from error
        except UBUnsupportedError as error:
            raise UBUnsupportedError(f"{path}: {error}") from error
        except ValueError as error:  # of the decoder, or of json: a number of thousands of digits too
            raise UBUnsupportedError(f"the tuning table {path} is no JSON: {error}") from error
        except RecursionError:
            raise UBUnsupportedError(f"the tuning table {path} is no table: it nests objects without end") from None

    def to_json(self) -> dict[str, Any]:
        """What :meth:`save` writes."""
        header = {name: getattr(self, name) for name in _HEADER}
        header["versions"] = dict(self.versions)
        return {"format": FORMAT, **header, "rows": [_row_json(row) for row in self.rows]}

    @classmethod
    def from_json(cls, data: Any) -> TuningTable:
        """The inverse of :meth:`to_json`; :class:`UBUnsupportedError` names what is missing or wrong."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = shown(data.get("format") if isinstance(data, Mapping) else type(data).__name__)
            raise UBUnsupportedError(f"no tuning table that this version reads: format is {found}, not {FORMAT!r}")
        table = Fields(data, "a tuning table")
        header: dict[str, Any] = {name: getattr(table, kind)(name) for name, kind in _HEADER.items()}
        if not is_mode(header["mode"]):
            raise UBUnsupportedError(f"a tuning table: mode = {shown(header['mode'])}: it is {WORDS}")
        rows = tuple(_row(row) for row in table.objects("rows", "row"))
        try:
            return cls(**header, rows=rows)
        except UBShapeError as error:
            raise UBUnsupportedError(str(error)) from error


# Field -> the method of Fields that takes it.
_HEADER: Mapping[str, str] = {
    "machine": "text",
    "versions": "texts",
    "tp": "whole",
    "hidden": "whole",
    "ffn": "whole",
    "dtype": "text",
    "mode": "text",
    "date": "text",
    "command": "text",
}
assert [*_HEADER, "rows", "forced"] == [each.name for each in fields(TuningTable)]


def this_machine() -> str:
    """What decides which overlap is best: the GPU's name, or the processor's where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def these_versions() -> dict[str, str]:
    """The installed versions of what runs an overlap."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _row_json(row: TuningRow) -> dict[str, Any]:
    candidates = [
        {"config": each.config.to_json(), "median_us": each.median_us, "spread_us": each.spread_us}
        for each in row.candidates
    ]
    chosen = row.chosen.to_json()
    facts = {"gemm": row.gemm, "tokens": row.tokens, "chosen": chosen, "reason": row.reason, "gemm_us": row.gemm_us}
    return {**facts, "candidates": candidates}


def _row(row: Fields) -> TuningRow:
    candidates = tuple(
        Candidate(_config(each, "config"), each.time("median_us"), each.time("spread_us", zero=True))
        for each in row.objects("candidates", "candidate")
    )
    gemm, chosen = row.text("gemm"), _config(row, "chosen")
    try:
        check_choices({gemm: (chosen,)})
    except UBUnsupportedError as error:
        raise UBUnsupportedError(f"{row.where}: {error}") from error
    return TuningRow(
        gemm=gemm,
        tokens=row.whole("tokens"),
        chosen=chosen,
        reason=row.text("reason"),
        candidates=candidates,
        gemm_us=None if row.is_null("gemm_us") else row.time("gemm_us"),
    )


def _config(owner: Fields, name: str) -> OverlapConfig:
    data = owner.object(name)
    try:
        return OverlapConfig.from_json(data)
    except UBShapeError as error:
        raise UBUnsupportedError(f"{owner.where}: {name} = {shown(data)}: {error}") from error


def _check_config(what: str, config: Any) -> None:
    if not isinstance(config, OverlapConfig):
        raise UBShapeError(f'{what} = {shown(config)}: it is an OverlapConfig, as in OverlapConfig("none")')

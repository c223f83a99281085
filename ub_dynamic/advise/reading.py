# SPDX-License-Identifier: Apache-2.0
"""Lengths of documents out of a file, a block at a time: numbers one a line, JSON lines, or a Parquet column."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UBShapeError, UBUnsupportedError
from ..input_file import check_input
from .distribution import Integers

OnProgress = Callable[[int], None]
"""Called with how much was read so far: bytes of a text file, rows of a Parquet file (see :func:`size_of`)."""

Parse = Callable[[Sequence[bytes]], list[int]]
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet", ".pq")
_BLOCK_BYTES = 1 << 22
_LARGEST = 2**40  # tokens; a larger number is not a length


def read_lengths(path: Path, field: str = "length", on_progress: OnProgress | None = None) -> Iterator[Integers]:
    """The lengths in ``path``, in order, as int64 arrays of some hundred thousand.

    The suffix says what the file is: ``.jsonl``, ``.ndjson`` or ``.json`` hold one JSON object a line, whose ``field``
    is taken; ``.parquet`` or ``.pq`` a column ``field`` (needs pyarrow); anything else one number a line. A field
    that holds a list, as ``input_ids`` does, counts as the number of its entries. Empty lines are passed over.

    Raises :class:`UBShapeError` that names the line, or row, and the value of what is no length: an integer of at
    least 0; also for a field that is not there and for a file without any length. :class:`UBUnsupportedError` for what
    is neither a regular file nor a pipe.
    """
    check_input(path)
    blocks = _parquet(path, field) if path.suffix.lower() in PARQUET else _lines(path, field)
    empty = True
    for lengths, done in blocks:
        empty = empty and not len(lengths)
        if on_progress is not None:
            on_progress(done)
        yield lengths
    if empty:
        raise UBShapeError(f"{path} holds no length")


def size_of(path: Path) -> int:
    """What a finished read of ``path`` reports: the rows of a Parquet file, the bytes of any other."""
    check_input(path)
    return int(_open_parquet(path).metadata.num_rows) if path.suffix.lower() in PARQUET else path.stat().st_size


def _lines(path: Path, field: str) -> Iterator[tuple[Integers, int]]:
    parse = partial(_json_lengths, field=field) if path.suffix.lower() in JSON_LINES else _numbers
    number, done = 1, 0
    with path.open("rb") as file:
        while lines := file.readlines(_BLOCK_BYTES):
            try:
                lengths = np.array(parse(lines), np.int64)
                valid = len(lengths) == len(lines) and lengths.min() >= 0 and lengths.max() <= _LARGEST
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                valid = False
            if not valid:  # an empty line, or a wrong one
                lengths = _with_care(path, lines, number, parse)
            number += len(lines)
            done += sum(map(len, lines))
            yield lengths, done


def _numbers(lines: Sequence[bytes]) -> list[int]:
    if b"_" in b"".join(lines):  # which int passes over
        raise ValueError
    return list(map(int, lines))


def _json_lengths(lines: Sequence[bytes], field: str) -> list[int]:
    records = json.loads(b"[" + b",".join(lines) + b"]")  # a fifth of the time of a call for each line
    return [value if type(value := record[field]) is int else _entries(value) for record in records]


def _entries(value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    raise ValueError(f"{value!r} is no length")


def _with_care(path: Path, lines: Sequence[bytes], first: int, parse: Parse) -> Integers:
    """The lengths of the lines that are not empty; raises for the first one that holds none."""
    lengths = []
    for number, line in enumerate(lines, first):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            (length,) = parse([line])
        except KeyError as error:
            known = ", ".join(json.loads(line))
            raise UBShapeError(f"{where}: there is no field {error}; it has {known}") from None
        except (ValueError, TypeError, RecursionError):
            raise UBShapeError(f"{where}: {_shown(line)} is no length, {_what(parse)}") from None
        lengths.append(_checked(length, where))
    return np.array(lengths, np.int64)


def _what(parse: Parse) -> str:
    if isinstance(parse, partial):
        return f"a JSON object whose field {parse.keywords['field']!r} is an integer or a list"
    return "an integer of at least 0"


def _checked(length: int, where: str) -> int:
    if not 0 <= length <= _LARGEST:
        raise UBShapeError(f"{where}: {length} is no length; a length is at least 0 and at most 2^40")
    return length


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _open_parquet(path: Path) -> Any:
    try:
        from pyarrow import lib, parquet
    except ImportError:
        raise UBUnsupportedError("Parquet files need pyarrow: pip install 'ub_dynamic[advise]'") from None
    try:
        return parquet.ParquetFile(path, buffer_size=1 << 20)
    except lib.ArrowException as error:
        raise UBShapeError(f"{path} is no Parquet file: {error}") from None


def _parquet(path: Path, field: str) -> Iterator[tuple[Integers, int]]:
    file = _open_parquet(path)
    from pyarrow import compute, types

    schema = file.schema_arrow
    if field not in schema.names:
        raise UBShapeError(f"{path}: there is no column {field!r}; it has {', '.join(schema.names)}")
    kind = schema.field(field).type
    lists = types.is_list(kind) or types.is_large_list(kind)
    if not lists and not types.is_integer(kind):
        raise UBShapeError(f"{path}: column {field!r} is {kind}; a column of lengths holds integers or lists")
    row = 0
    for batch in file.iter_batches(batch_size=1 << (10 if lists else 17), columns=[field]):
        column = compute.list_value_length(batch.column(0)) if lists else batch.column(0)
        if column.null_count:
            null = column.is_null().to_pylist().index(True)
            raise UBShapeError(f"{path}, row {row + null}: there is no value in column {field!r}")
        values = column.to_numpy()
        wrong = np.flatnonzero((values < 0) | (values > _LARGEST))
        if len(wrong):
            _checked(int(values[wrong[0]]), f"{path}, row {row + int(wrong[0])}")
        row += len(values)
        yield values.astype(np.int64, copy=False), row

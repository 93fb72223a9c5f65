"""From files to rows: dictionaries as they stand in the file, each with the place to name in a message.

Reads a file piece by piece; only a .json list is in memory as a whole. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TextIO

from greedysnake.data.files import Source
from greedysnake.errors import ConfigError

# A longer text file is read in parts of this size, cut at line ends, so that none has to fit into memory.
PART_CHARACTERS = 2**20
PARQUET_ROWS = 256


@dataclass(frozen=True)
class Row:
    """One row of a file. `problem` says why it cannot be used; then `values` is empty."""

    where: str
    values: dict[str, Any]
    problem: str = ""
    ends: bool = True
    """False for a part of a long text file that another part follows."""


class RowError(Exception):
    """This row cannot be used; the message says why, without the place."""


def check_unicode(text: str, where: str) -> None:
    """RowError unless `text` can be written as UTF-8, which JSON's escapes do not promise."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(f"half of a surrogate pair in {where}, which is no character") from None


def read_rows(source: Source, *, text_column: str, columns: Collection[str]) -> Iterator[Row]:
    """The rows of a file in its order. A text file is one row, its text under `text_column`.

    Columns that are not among `columns` may be None instead of what the file has.
    """
    if source.kind == "text":
        return _text_rows(source, text_column)
    if source.kind == "parquet":
        return _parquet_rows(source, columns)
    if source.kind == "dataset":
        return _dataset_rows(source)
    return _json_rows(source)


def _text_rows(source: Source, text_column: str) -> Iterator[Row]:
    with source.path.open(encoding="utf-8-sig", newline="") as file:
        try:
            part = _next_part(file)
            while part:
                following = _next_part(file)
                yield Row(str(source.path), {text_column: part}, ends=not following)
                part = following
        except UnicodeDecodeError as error:
            yield Row(str(source.path), {}, f"not UTF-8 text (byte 0x{error.object[error.start]:02x})")


def _next_part(file: TextIO) -> str:
    """The next one that is not blank; "" at the end of the file."""
    while part := file.read(PART_CHARACTERS):
        if len(part) == PART_CHARACTERS:  # up to the end of the line, unless a line goes on for ever
            part += file.readline(PART_CHARACTERS)
        if part.strip():
            break
    return part


def _json_rows(source: Source) -> Iterator[Row]:
    with source.path.open("rb") as file:
        if source.kind == "json" and _first_byte(file) == b"[":
            yield from _list_rows(source, file.read())
            return
        is_first = True
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line:
                continue
            where = f"{source.path} line {number}"
            try:
                row = _checked_row(where, json.loads(line))
            except (ValueError, RecursionError) as error:
                if source.kind == "json" and is_first and _is_one_object(source):
                    yield Row(str(source.path), {}, _ONE_OBJECT)
                    return
                row = Row(where, {}, f"not valid JSON ({_reason(error)})")
            is_first = False
            yield row


_ONE_OBJECT = "one object over several lines, where a list of objects or one object per line is expected"


def _is_one_object(source: Source) -> bool:
    try:
        return isinstance(json.loads(source.path.read_bytes()), dict)
    except (ValueError, RecursionError):
        return False


def _first_byte(file: Any) -> bytes:
    """The first byte that is no white space; the file is then at its start again."""
    lines = (line.removeprefix(BOM_UTF8).strip() for line in file)
    first = next((line[:1] for line in lines if line), b"")
    file.seek(0)
    return bytes(first)


def _list_rows(source: Source, content: bytes) -> Iterator[Row]:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        yield Row(str(source.path), {}, f"not valid JSON ({_reason(error)})")
        return
    for number, value in enumerate(values, start=1):
        yield _checked_row(f"{source.path} row {number}", value)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def _checked_row(where: str, value: object) -> Row:
    if isinstance(value, dict):
        return Row(where, value)
    return Row(where, {}, f"{type(value).__name__}, not an object with columns")


def _parquet_rows(source: Source, columns: Collection[str]) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{source.path} needs the package pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(source.path) as file:
            # Others may be large, or hold what Python has no value for, such as a time in nanoseconds.
            unread = dict.fromkeys(file.schema_arrow.names)
            wanted = [name for name in unread if name in columns]
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=wanted))
            yield from _numbered(source, ({**unread, **row} for row in chain.from_iterable(batches)))
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source.path} cannot be read as parquet ({reason}): write it anew") from None


def _dataset_rows(source: Source) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{source.path} was written by save_to_disk and needs the package datasets: pip install datasets"
        ) from None
    try:
        found = datasets.load_from_disk(str(source.path))
    except Exception as error:  # whatever it raises; IndexError where a data set has no rows
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{source.path} cannot be read as a data set, or has no rows ({reason}): write it anew with save_to_disk"
        ) from None
    yield from _numbered(source, found)


def _numbered(source: Source, values: Iterable[object]) -> Iterator[Row]:
    for number, value in enumerate(values, start=1):
        if isinstance(value, dict):
            value = {column: _without_nulls(item) for column, item in value.items()}
        yield _checked_row(f"{source.path} row {number}", value)


def _without_nulls(value: Any) -> Any:
    """Without the keys that a fixed schema adds: every object in a column has the keys of all objects in it.

    The content of a message stays, for there are templates that ask whether it is none.
    """
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    return value

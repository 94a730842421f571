"""Rows of JSONL, JSON and parquet files, directories of them, slices `path@[a:b]` and Hub data sets, as plain Python values.

It reads and places rows (file, line); it does not know what a prompt or an answer is (see `columns`).
"""

import codecs
import datetime
import decimal
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from etils import epath

SUFFIXES = (".jsonl", ".json", ".parquet")
_SLICE = re.compile(r"(?P<path>.+)@\[(?P<first>-?\d*):(?P<last>-?\d*)\]", re.DOTALL)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
_HUB_PREFIX = "hf://datasets/"
_WIDE_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class DataError(ValueError):
    """Data that cannot be used as they are; the message says the file, the line or row, and what to do."""


class Row(NamedTuple):
    """One record. `number` is what an editor shows (line from 1; row index from 0 in parquet and JSON lists);
    `index` counts the rows of all files from 0, before any slice, so that it does not move with blank lines or slices."""

    number: int
    columns: dict
    file: str = ""
    index: int = 0

    @property
    def place(self) -> str:
        """Where the row stands, for messages: `train.jsonl:3`."""
        return f"{self.file}:{self.number}"

    @property
    def file_name(self) -> str:
        """The file's name without its folders: the data source of rows that name none, equal on every machine."""
        return self.file.rsplit("/", 1)[-1]


def read_rows(path: str) -> list[Row]:
    """All rows of `path`: a .jsonl, .json (list or lines) or .parquet file, a directory of them (sorted by name, not recursive),
    a Hub id `org/name[:config][:split]` or `hf://datasets/org/name` (split `train` when none is given; needs the package `datasets`).

    `path@[a:b]` keeps rows a to b − 1 as Python slices do; `gs://` paths go through etils.
    Raises DataError with file and line when anything cannot be read; nothing is dropped.
    """
    path = str(path)
    sliced = _SLICE.fullmatch(path)
    source = sliced["path"] if sliced else path
    rows = [row._replace(index=index) for index, row in enumerate(_rows_of(source))]
    if sliced:
        bounds = [int(sliced[end]) if sliced[end] else None for end in ("first", "last")]
        kept = rows[slice(*bounds)]
        if rows and not kept:
            raise DataError(f"{path}: the slice keeps none of the {len(rows)} rows")
        rows = kept
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def _rows_of(source: str) -> Iterator[Row]:
    if source.startswith(_HUB_PREFIX):
        yield from _hub_rows(source.removeprefix(_HUB_PREFIX))
        return
    place = epath.Path(source).expanduser()
    if place.is_dir():
        files = sorted((entry for entry in place.iterdir() if entry.suffix in SUFFIXES), key=lambda entry: entry.name)
        if not files:
            raise DataError(f"{source}: the directory holds no {', '.join(SUFFIXES)} file")
        for file in files:
            yield from _file_rows(file)
    elif place.exists():
        yield from _file_rows(place)
    elif _HUB_ID.fullmatch(source) and place.suffix not in SUFFIXES:
        yield from _hub_rows(source)
    else:
        raise DataError(f"{source}: no such file or directory")


def _file_rows(place) -> Iterator[Row]:
    name = str(place)
    if place.suffix == ".parquet":
        return _parquet_rows(place, name)
    if place.suffix not in SUFFIXES:
        raise DataError(f"{name}: not one of the known formats {', '.join(SUFFIXES)}")
    text = decoded(place.read_bytes(), name)
    if place.suffix == ".json" and text.lstrip().startswith("["):
        return _list_rows(text, name)
    return _line_rows(text, name)


def decoded(content: bytes, name: str) -> str:
    """The text of a UTF-8 file, without a byte-order mark."""
    if content.startswith(_WIDE_MARKS) or b"\0" in content[:64]:
        raise DataError(f"{name}: the file is UTF-16 or UTF-32, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 {name}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}:{line}: byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8") from error


def _line_rows(text: str, name: str) -> Iterator[Row]:
    lines = text.split("\n")  # not splitlines(): JSON strings may hold U+2028, which is no line end here
    last = max((number for number, line in enumerate(lines, 1) if line.strip()), default=0)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            cut = "; the last record looks cut: was the file copied completely?" if number == last else ""
            raise DataError(f"{name}:{number}: not JSON ({error.msg}, column {error.colno}); one object a line is expected{cut}") from error
        yield Row(number, _record(record, f"{name}:{number}"), name)


def _list_rows(text: str, name: str) -> Iterator[Row]:
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{name}:{error.lineno}: not JSON ({error.msg}, column {error.colno}); was the file copied completely?") from error
    for number, record in enumerate(records):
        yield Row(number, _record(record, f"{name}, entry {number}"), name)


def _record(record: object, place: str) -> dict:
    if not isinstance(record, dict):
        raise DataError(f"{place}: a row must be a JSON object with named columns, not {type(record).__name__}")
    return record


def _parquet_rows(place, name: str) -> Iterator[Row]:
    import pyarrow  # here: a run on JSONL or a generated task does not pay for it
    from pyarrow import parquet

    try:
        with place.open("rb") as file:
            table = parquet.read_table(pyarrow.PythonFile(file, mode="r"))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable parquet file ({error}); was it copied completely?") from error
    for number, record in enumerate(table.to_pylist()):
        yield Row(number, {key: _plain(value) for key, value in record.items()}, name)


def _hub_rows(identifier: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{identifier}: no such file or directory here, and reading it as a Hub data set needs the package `datasets`: "
            "pip install datasets, or download its parquet files and give their directory"
        ) from error
    name, *parts = identifier.split(":")
    config, split = (None, "train") if not parts else (None, parts[0]) if len(parts) == 1 else parts
    try:
        records = datasets.load_dataset(name, config, split=split)
    except (ValueError, OSError) as error:
        raise DataError(f"{identifier}: the Hub data set cannot be loaded ({error}); the form is org/name[:config][:split]") from error
    for number, record in enumerate(records):
        yield Row(number, {key: _plain(value) for key, value in record.items()}, identifier)


def _plain(value: object) -> object:
    """`value` as lists, dicts, strings, booleans and numbers, recursively: chat templates fail on anything else."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, decimal.Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return value

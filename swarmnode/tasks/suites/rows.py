"""Rows of a suite's files, each with the place it stands at.

FILE, FOLDER -> [files_of, read_rows] -> suite.py

A row that cannot be read is a `BadRow`: who evaluates on a part of a suite without knowing it compares what
cannot be compared, so all of them are told and none is left out.
"""

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from swarmnode.errors import TaskError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")

MAX_ROW_BYTES = 1 << 20
"""No question of these suites is near it."""

MAX_FILE_BYTES = 1 << 28
"""The largest of them has a few megabytes."""

MAX_FILES = 50_000
"""MATH comes as 12,500 files."""

Columns = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PlacedColumns:
    """A row, and the file and line where it stands."""

    place: str
    columns: Columns


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and why."""

    place: str
    fault: str

    def __str__(self) -> str:
        return f"{self.place}: {self.fault}"


ReadRow = PlacedColumns | BadRow


def files_of(path: Path) -> list[Path]:
    """The file itself, or every file of a folder, at any depth, that may hold rows. Raises TaskError."""
    path = path.expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES))
        if len(found) > MAX_FILES:
            raise TaskError(f"{path} has more than {MAX_FILES} files", hint="name a folder within it")
    else:
        found = [path] if path.is_file() and path.name.endswith(SUFFIXES) else []
    if not found:
        raise TaskError(
            f"there is no suite {path}", hint=f"a file, or a folder of files: {', '.join(SUFFIXES)}"
        )
    return found


def read_rows(path: Path) -> Iterator[ReadRow]:
    """The rows of a file in their order. Raises TaskError where it cannot be read at all."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TaskError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", hint="is it a suite?")
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix == ".json":
            yield from _json(path)
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                yield from _json_lines(cast(IO[bytes], file), path)
    except (OSError, EOFError) as error:
        raise TaskError(f"cannot read {path}: {error}", hint="is it whole?") from error


def _json_lines(file: IO[bytes], path: Path) -> Iterator[ReadRow]:
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise TaskError(
                f"{path} line {number} is longer than {MAX_ROW_BYTES} bytes", hint="is it a suite?"
            )
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield _decoded(line, f"{path} line {number}")


def _json(path: Path) -> Iterator[ReadRow]:
    """One object, as MATH has a file a question, or a list of them."""
    decoded = _decode(path.read_bytes())
    if isinstance(decoded, list):
        for number, row in enumerate(cast(list[Any], decoded), 1):
            yield _placed(row, f"{path} row {number}")
    else:
        yield _placed(decoded, f"{path} row 1")


def _parquet(path: Path) -> Iterator[ReadRow]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise TaskError(f"{path} needs pyarrow, which is missing", hint="pip install pyarrow") from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except ValueError as error:  # pyarrow's own errors are such
        raise TaskError(f"{path} cannot be read as Parquet: {error}", hint="write it again") from error
    for number, row in enumerate(rows, 1):
        yield PlacedColumns(f"{path} row {number}", row)


def _decoded(line: bytes, place: str) -> ReadRow:
    return _placed(_decode(line), place)


def _decode(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BadRow("", f"no JSON: {error}")


def _placed(row: Any, place: str) -> ReadRow:
    if isinstance(row, BadRow):
        return BadRow(place, row.fault)
    if not isinstance(row, dict):
        return BadRow(place, "no JSON object")
    return PlacedColumns(place, cast(dict[str, Any], row))

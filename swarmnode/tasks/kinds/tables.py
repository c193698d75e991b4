"""Rows of a data set, each with its place, so that an error names file and line."""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from swarmnode.errors import TaskError
from swarmnode.machine.installing import how_to_install
from swarmnode.tasks.kinds.hub_datasets import load_from_hub
from swarmnode.tasks.optional_packages import extra_module
from swarmnode.tasks.specs import TaskKind, TaskSpec

MAX_DATA_BYTES = 2 << 30
"""Largest file of questions, in bytes."""

MAX_ROW_BYTES = 1 << 18
"""Longest row in bytes. A row goes to the node in one piece, and a longer prompt fits into no context."""

Columns = dict[str, Any]
PlacedRow = tuple[str, Columns]
"""A row with its place: file and line."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, with the reason."""

    place: str
    fault: str

    def __str__(self) -> str:
        return f"{self.place}: {self.fault}"


def read_table(spec: TaskSpec) -> Iterator[PlacedRow]:
    """Yields the rows of a data set in their order. Raises TaskError, for a bad row when it is reached."""
    if spec.kind == TaskKind.HUB:
        return _numbered(load_from_hub(spec.name), f"{spec.name} row")
    path = Path(spec.name).expanduser()
    if path.is_dir():
        return _numbered(_folder(path, spec.one("split")), f"{path} row")
    reader = _READERS.get(path.suffix)
    if reader is None or not path.is_file():
        raise TaskError(
            f"no data set at {path}",
            hint=f"pass a file that ends with {', '.join(_READERS)}, or a folder saved by `datasets`",
        )
    if path.stat().st_size > MAX_DATA_BYTES:
        raise TaskError(f"{path} is larger than {MAX_DATA_BYTES >> 30} GiB", hint="use a part of it")
    return reader(path)


def _json_lines(path: Path) -> Iterator[PlacedRow]:
    with path.open("rb") as file:
        for row in read_json_lines(file, path, MAX_ROW_BYTES):
            if isinstance(row, BadRow):
                raise TaskError(f"{row.place} is {row.fault}", hint='write {"prompt": ..., "answer": ...}')
            yield row


def read_json_lines(file: IO[bytes], path: Path, most_bytes: int) -> Iterator[PlacedRow | BadRow]:
    """Yields one object per line and skips empty lines. Raises TaskError for a line of more than
    `most_bytes`."""
    number = 0
    while line := file.readline(most_bytes + 1):
        number += 1
        if len(line) > most_bytes:
            raise TaskError(f"{path} line {number} is longer than {most_bytes} bytes", hint="shorten it")
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield json_row(decoded(line), f"{path} line {number}")


def decoded(text: bytes) -> Any:
    """Returns the value of a JSON text, or a `BadRow` without a place."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadRow("", f"not JSON: {error}")


def json_row(row: Any, place: str) -> PlacedRow | BadRow:
    """Returns a decoded row with its place."""
    if isinstance(row, BadRow):
        return BadRow(place, row.fault)
    return (place, cast(Columns, row)) if isinstance(row, dict) else BadRow(place, "not a JSON object")


def _comma_separated(path: Path) -> Iterator[PlacedRow]:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            header: list[str] | None = None
            for cells in _csv_rows(rows, path):
                if not cells:
                    continue
                place = f"{path} line {rows.line_num}"
                if header is None:
                    header = cells
                    continue
                if len(cells) != len(header):
                    raise TaskError(
                        f"{place} has {len(cells)} fields, but the first line has {len(header)}",
                        hint="put fields that contain commas or line breaks in double quotes",
                    )
                yield place, dict(zip(header, cells, strict=True))
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from error


def _csv_rows(rows: Any, path: Path) -> Iterator[list[str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise TaskError(f"{path} line {rows.line_num}: {error}", hint="check the quotes there") from error


def read_parquet(path: Path) -> Iterator[PlacedRow]:
    """Yields the rows of a Parquet file. Raises TaskError if it is not one."""
    parquet = extra_module("pyarrow.parquet", how_to_install("data"), path)
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from _numbered(rows, f"{path} row")
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own errors are all three
        raise TaskError(f"{path} cannot be read as Parquet: {error}", hint="write the file again") from error


def _folder(path: Path, split: str | None) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a folder that `datasets` saved: a single set, or one of several splits."""
    datasets = extra_module("datasets", how_to_install("data"), path)
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise TaskError(
            f"{path} is not a folder saved by `datasets`: {error}", hint="make one with save_to_disk(...)"
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        return iter(found)
    splits: Mapping[str, Any] = found
    chosen = split or ("train" if "train" in splits or len(splits) > 1 else next(iter(splits)))
    if chosen not in splits:
        raise TaskError(f"{path} has no split {chosen!r}", hint=f"choose one: ?split={'|'.join(splits)}")
    return iter(splits[chosen])


def _numbered(rows: Iterator[Mapping[str, Any]], what: str) -> Iterator[PlacedRow]:
    for number, row in enumerate(rows, 1):
        yield f"{what} {number}", dict(row)


_READERS: Mapping[str, Callable[[Path], Iterator[PlacedRow]]] = {
    ".jsonl": _json_lines,
    ".csv": _comma_separated,
    ".parquet": read_parquet,
}


def take(rows: Iterator[PlacedRow], most: int, what: object) -> Iterator[PlacedRow]:
    """Yields the rows of a set. Raises TaskError if there are more than `most`."""
    yield from islice(rows, most)
    if next(rows, None) is not None:
        raise TaskError(f"{what} has more than {most} rows", hint="use a part of it")

"""Rows of a suite's files, each with its file and line."""

import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from swarmnode.errors import TaskError
from swarmnode.tasks.kinds.tables import BadRow, PlacedRow, decoded, json_row, read_json_lines, read_parquet

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")

MAX_ROW_BYTES = 1 << 20
"""Longest row in bytes, far above any question of these suites."""

MAX_FILE_BYTES = 1 << 28
"""Largest file in bytes; the largest suite has a few megabytes."""

MAX_FILES = 50_000
"""Most files of a suite. MATH comes as 12,500."""

Columns = Mapping[str, Any]
ReadRow = PlacedRow | BadRow


def files_of(path: Path) -> list[Path]:
    """Returns the file itself, or every file of a folder, at any depth, that may hold rows. Raises
    TaskError."""
    path = path.expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES))
        if len(found) > MAX_FILES:
            raise TaskError(f"{path} has more than {MAX_FILES} files", hint="name a folder inside it")
    else:
        found = [path] if path.is_file() and path.name.endswith(SUFFIXES) else []
    if not found:
        raise TaskError(
            f"there is no suite {path}", hint=f"a file, or a folder of files: {', '.join(SUFFIXES)}"
        )
    return found


def read_rows(path: Path) -> Iterator[ReadRow]:
    """Yields the rows of a file in their order. Raises TaskError if it cannot be read at all."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TaskError(
                f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", hint="check that it is a suite"
            )
        if path.suffix == ".parquet":
            yield from read_parquet(path)
        elif path.suffix == ".json":
            yield from _json(path)
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                yield from read_json_lines(cast(IO[bytes], file), path, MAX_ROW_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {path}: {error}", hint="check that it is complete") from error


def _json(path: Path) -> Iterator[ReadRow]:
    """Returns one object (MATH has a file for each question) or the objects of a list."""
    rows = decoded(path.read_bytes())
    for number, row in enumerate(cast(list[Any], rows) if isinstance(rows, list) else [rows], 1):
        yield json_row(row, f"{path} row {number}")

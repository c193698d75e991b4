"""Rows that a script holds in memory: lists, sets of `datasets`, data frames, generators, several splits.

Node(rows, eval_dataset=...) -> [split, rows_of] -> script_objects.py

None of these libraries is imported: objects are recognized by their methods. Equal rows are the same task,
whatever held them.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from swarmnode.errors import TaskError
from swarmnode.tasks.kinds.data import MAX_ROWS
from swarmnode.tasks.kinds.tables import read_table
from swarmnode.tasks.specs import TaskKind, parse_spec

logger = logging.getLogger(__name__)

MOST_STREAMED = 50_000
"""Most rows read of a source without a length: some streams never end, and all rows stay in memory."""

TRAINING_SPLIT = "train"
EVALUATION_SPLITS = ("validation", "valid", "val", "dev", "eval", "test")
"""Names of evaluation splits: the first that exists measures a policy trained on the split `train`."""


def split(given: object) -> tuple[object, object]:
    """Returns the rows to train on and those to measure with (None: no such split), if `given` names splits
    as a DatasetDict does. Raises TaskError if no split is known."""
    if not isinstance(given, Mapping):
        return given, None
    splits = cast(Mapping[Any, object], given)
    measured = next((name for name in EVALUATION_SPLITS if name in splits), None)
    if TRAINING_SPLIT not in splits and measured is None:
        raise TaskError(
            f"no split {TRAINING_SPLIT!r} among {', '.join(map(str, splits))}"[:200],
            hint="pass one split: splits[NAME], and eval_dataset=splits[OTHER]",
        )
    logger.info("splits %s: measured on %s", ", ".join(map(str, splits)), measured or "a fifth of train")
    return splits.get(TRAINING_SPLIT, ()), None if measured is None else splits[measured]


def rows_of(given: object) -> list[Any] | None:
    """Returns all rows as plain values, or None if `given` holds no rows. Of a source without a length, the
    first MOST_STREAMED. Raises TaskError for an unreadable file."""
    if isinstance(given, str | Path):
        spec = parse_spec(str(given))
        if spec.kind not in (TaskKind.DATA, TaskKind.HUB):
            return None
        return [row for _, row in islice(read_table(spec), MAX_ROWS + 1)]
    if isinstance(given, bytes | bytearray | Mapping | set | frozenset | type):
        return None
    frame = _records(given)
    found = given if frame is None else frame
    if not isinstance(found, Iterable):
        return None
    found = cast(Iterable[Any], found)
    # A list stays as it is, so that an error names the faulty row.
    if isinstance(found, Sequence) or hasattr(found, "__len__"):
        rows = list(islice(found, MAX_ROWS + 1))
    else:
        stream = iter(found)
        rows = list(islice(stream, MOST_STREAMED))
        if len(rows) == MOST_STREAMED and next(stream, rows) is not rows:
            logger.warning("%s has more rows; using the first %d", type(given).__name__, MOST_STREAMED)
    return [_plain(row, missing=frame is not None) for row in rows]


def _records(given: Any) -> list[dict[str, Any]] | None:
    """Returns the rows of a data frame of pandas or polars, or of a table of pyarrow. None: it is something
    else."""
    for name in ("to_dicts", "to_pylist"):
        if callable(rows := getattr(given, name, None)):
            return cast(list[dict[str, Any]], rows())
    if callable(rows := getattr(given, "to_dict", None)) and hasattr(given, "iterrows"):
        return cast(list[dict[str, Any]], rows("records"))
    return None


def _plain(value: Any, *, missing: bool) -> Any:
    """Returns a value without numpy objects. `missing`: NaN becomes None, as in columns of a data frame."""
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {name: _plain(one, missing=missing) for name, one in items}
    if isinstance(value, list | tuple):
        values = [_plain(one, missing=missing) for one in cast(Sequence[Any], value)]
        return tuple(values) if isinstance(value, tuple) else values
    if callable(convert := getattr(value, "tolist", None)):
        return _plain(convert(), missing=missing)
    return None if missing and isinstance(value, float) and math.isnan(value) else value

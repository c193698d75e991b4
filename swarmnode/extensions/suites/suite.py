"""A suite: a file or a folder of questions that are asked and never trained on.

--suite FILE, FOLDER -> suite_rows.py -> [load_suites] -> Suite -> extensions/suites/suite_evaluation.py

A suite is a task in all but this: it draws no examples. `examples`, through which training, exchange and
redraws go, raises; what it asks is told by `questions`, which only an evaluation reads.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarmnode.errors import TaskError
from swarmnode.extensions.suites.formats import (
    FORMATS,
    HUMANEVAL,
    Prompting,
    SuiteFormat,
    before_stop,
    format_of,
)
from swarmnode.extensions.suites.suite_rows import Columns, ReadRow, files_of, read_rows
from swarmnode.tasks.kinds.tables import BadRow
from swarmnode.types import Example, ExampleKey

MOST_NAMED = 5
"""Most bad rows that are named; the others are counted."""


@dataclass(frozen=True, slots=True)
class SuiteQuestions:
    """The questions of a suite, and the number of those left out because no answer to them could be
    judged."""

    asked: tuple[Example, ...]
    unknown: Mapping[str, int]
    """Number of questions by reason."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The questions of one format in one file or folder."""

    name: str
    version: str
    """A digest of the rows: figures can be compared where it is the same."""
    format: SuiteFormat
    rows: tuple[Columns, ...]
    path: Path

    def examples(self, seed: int) -> Iterator[Example]:
        """Raises TaskError: a suite has no training examples."""
        raise TaskError(
            f"suite {self.name} is for evaluation only and is never trained on",
            hint="name another task to train on",
        )

    def questions(self, prompting: Prompting, limit: int | None = None) -> SuiteQuestions:
        """Returns the first `limit` rows in the form in which they are asked."""
        asked: list[Example] = []
        unknown: Counter[str] = Counter()
        for index, columns in enumerate(self.rows[:limit]):
            if reason := self.format.unknown(columns):
                unknown[reason] += 1
            else:
                key = ExampleKey(self.name, self.version, 0, index)
                asked.append(Example(key, self.format.ask(columns, prompting), columns))
        return SuiteQuestions(tuple(asked), unknown)

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """Returns 1.0 or 0.0 for each answer, up to its end (`ended`). None: it cannot be judged."""
        answers = [self.ended(text) for text in completions]
        return [{"right": right} for right in self.format.judge(example.columns, answers)]

    def ended(self, completion: str) -> str:
        """Returns the answer without text that a model makes up behind it, such as the next question."""
        return before_stop(completion, self.format.stops)


def load_suites(paths: Sequence[Path]) -> dict[str, Suite]:
    """Returns the suites of files and folders, by name. Raises TaskError, with the places of bad rows."""
    suites: dict[str, Suite] = {}
    for suite in (suite for path in paths for suite in _load(path)):
        if suite.name in suites:
            raise TaskError(f"two suites are called {suite.name}", hint="name each once, or rename a file")
        suites[suite.name] = suite
    return suites


def _load(path: Path) -> list[Suite]:
    """Yields one suite for each format that is found."""
    rows: dict[str, list[Columns]] = defaultdict(list)
    bad: list[BadRow] = []
    for file in files_of(path):
        for found in _told(read_rows(file)):
            match found:
                case BadRow():
                    bad.append(found)
                case form, columns:
                    rows[form.name].append(columns)
    if bad:
        raise _unusable(path, bad)
    stem = path.name.partition(".")[0] or path.resolve().name
    formats = [form for form in FORMATS if form.name in rows]
    if not formats:
        raise TaskError(f"{path} has no rows", hint="name a file of questions")
    if programs := rows.get(HUMANEVAL.name):
        # Where nothing can be run, that is to be said before a model is loaded.
        HUMANEVAL.judge(programs[0], ["    pass\n"])
    several = len(formats) > 1
    return [
        Suite(
            f"{stem}-{form.name}" if several else stem,
            _digest(rows[form.name]),
            form,
            tuple(rows[form.name]),
            path.expanduser().resolve(),
        )
        for form in formats
    ]


def _told(rows: Iterator[ReadRow]) -> Iterator[tuple[SuiteFormat, Columns] | BadRow]:
    """Yields each row of a file with the file's format, which the first recognized row tells."""
    form: SuiteFormat | None = None
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        place, columns = row
        form = form or format_of(columns)
        fault = _no_format(columns) if form is None else _fault(form, columns)
        yield (form, columns) if form is not None and fault is None else BadRow(place, fault or "")


def _fault(form: SuiteFormat, columns: Columns) -> str | None:
    for name, kind in form.columns.items():
        if name not in columns:
            return f"it has no {name}, which rows of {form.name} need"
        if not isinstance(columns[name], kind) or not columns[name]:
            return f"its {name} is {columns[name]!r:.40}"
    return form.fault(columns)


def _no_format(columns: Columns) -> str:
    known = "; ".join(f"{form.name}: {', '.join(form.columns)}" for form in FORMATS)
    return f"its columns ({', '.join(columns)}) match no known format ({known})"


def _unusable(path: Path, bad: Sequence[BadRow]) -> TaskError:
    named = "; ".join(str(row) for row in bad[:MOST_NAMED])
    more = f"; and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
    rows = "a row" if len(bad) == 1 else f"{len(bad)} rows"
    return TaskError(
        f"{path} has {rows} that cannot be used: {named}{more}",
        hint="fix or remove them: a score on part of a suite is not the suite's score",
    )


def _digest(rows: Sequence[Columns]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for columns in rows:
        row = msgspec.json.encode(columns, order="deterministic", enc_hook=repr)
        state.update(len(row).to_bytes(4, "little") + row)
    return state.hexdigest()

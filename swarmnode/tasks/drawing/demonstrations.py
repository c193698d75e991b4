"""Demonstrations: written answers that give a start to a policy which is never right.

column `demonstration`, Task.demonstrations, sn.run(demonstrations=...) -> [Demonstrations] -> demonstrated.py

The task's own judge judges them like any answer, and those with full marks go into the node's own book
(training/rules/demonstrated.py). A policy never reads one in a prompt. None belongs to a held-out example,
and none is published, since nobody sampled it. Once the policy finds the answer itself, that is an answer of
its own and travels like all others. They are not part of a task's version unless they are a column of its
rows: nodes with and without them exchange rollouts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from swarmnode.chat import Prompt
from swarmnode.errors import TaskError
from swarmnode.tasks.kinds.rows_in_memory import rows_of
from swarmnode.tasks.rows import read_row
from swarmnode.tasks.source_file import of_theirs
from swarmnode.tasks.task import (
    DEMONSTRATED_SEED,
    Task,
    demonstrations_of,
    draw_held_out,
    evaluation_size_of,
    is_held_out,
)
from swarmnode.types import Example, ExampleKey

COLUMN = "demonstration"
"""The column of an example that holds one text, or several."""

MOST_TEXTS = 16
"""Most demonstrations of one example."""

Texts = str | Sequence[str] | None
GivenDemonstrations = Callable[[Example], Texts] | Mapping[str, Texts] | Sequence[Mapping[str, Any]]
"""Forms of given demonstrations: a function of the example; texts by prompt; or rows with a prompt, the
columns that the judge needs, and a column `demonstration`."""


class Demonstrations:
    """The demonstrations of a node's tasks."""

    def __init__(self, given: GivenDemonstrations | None = None) -> None:
        """`given`: demonstrations besides those of the examples and of the tasks."""
        self._given = given

    def of(self, task: Task, example: Example) -> tuple[str, ...]:
        """Returns the demonstrations of an example. Raises TaskError."""
        found = _texts(example.columns.get(COLUMN), example.prompt)
        for given in self._sources(task):
            if callable(given):
                told = of_theirs(
                    f"demonstrations= failed on {example.prompt!r:.60}",
                    lambda given=given: given(example),
                    'the function is passed an Example: example.prompt, example.columns["answer"].',
                )
                found += _texts(told, example.prompt)
            elif isinstance(given, Mapping):
                found += _texts(cast("Mapping[Prompt, Texts]", given).get(example.prompt), example.prompt)
        return found[:MOST_TEXTS]

    def rows(self, task: Task) -> Iterator[Example]:
        """Yields the examples that were given whole, without held-out ones. Raises TaskError."""
        rows = [row for given in self._sources(task) for row in _rows(given)]
        measured: set[Prompt] = set()
        if rows and evaluation_size_of(task):
            measured = {example.prompt for example in draw_held_out(task, 0)}
        for index, row in enumerate(rows):
            key = ExampleKey(task.name, task.version, DEMONSTRATED_SEED, index)
            example = read_row(row, key, f"demonstration {index + 1}")
            if not _texts(example.columns.get(COLUMN), example.prompt):
                raise TaskError(
                    f"demonstration {index + 1} has no column {COLUMN!r}",
                    hint="put the text of the answer in it",
                )
            held_out = example.prompt in measured if measured else is_held_out(example.prompt)
            if not held_out:
                yield example

    def _sources(self, task: Task) -> list[GivenDemonstrations]:
        return [demonstrations_of(task), *([] if self._given is None else [self._given])]


def _rows(given: GivenDemonstrations) -> list[Any]:
    if callable(given) or isinstance(given, Mapping):
        return []
    rows = rows_of(given)
    if rows is None:
        raise TaskError(
            f"invalid demonstrations: {given!r:.80}",
            hint="pass a function of the example, a mapping of prompts to texts, or rows with a column"
            f" {COLUMN!r}",
        )
    return list(rows)


def _texts(value: object, prompt: Prompt) -> tuple[str, ...]:
    """Returns one or several texts as a tuple. Raises TaskError."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple):
        several = cast("Sequence[object]", value)
        if all(isinstance(one, str) for one in several):
            return tuple(cast("Sequence[str]", several))
    raise TaskError(
        f"the demonstration of {prompt!r:.60} is not text: {value!r:.60}",
        hint="pass one string, or a list of them",
    )

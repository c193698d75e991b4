"""Tasks and rewards that are objects of a running script rather than files: functions, rows, Task objects.

script -> [as_task] -> Task -> api.py -> a node

Their code runs in the node's own process, as nothing else could: a function of a notebook has no file that a
process of its own could load. Only what the script itself passes in ever gets here, nothing from the wire.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from swarmnode.errors import TaskError
from swarmnode.tasks.data import shuffled
from swarmnode.tasks.loader import TASK_NAME, FileTask
from swarmnode.tasks.rewards import (
    RemoteReward,
    Reward,
    are_exchangeable,
    load_reward,
    named_rewards,
    score_with,
)
from swarmnode.tasks.task import Task, is_exchangeable, is_task
from swarmnode.types import Example

Draw = Callable[[int], Iterable[Any]]
"""`examples(seed)` of a task file: prompts, (prompt, answer) pairs, or dictionaries with a "prompt"."""

Rows = Sequence[Any]
"""Examples as they are, in the forms that `examples(seed)` may yield."""

RewardSpec = Reward | str
"""A function on TRL's contract, or the name of one: `exact_match`, `file.py:function`, `module:function`."""

NAMELESS = frozenset({"examples", "<lambda>"})
"""Names of functions that say nothing about their task."""


@dataclass(frozen=True, slots=True)
class RewardedTask:
    """The examples of one task, judged by other rewards. Another judge is another version: who has only one
    of the two exchanges nothing with us."""

    task: Task
    rewards: Mapping[str, Reward]
    version: str

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def exchangeable(self) -> bool:
        """Whether the other task is, and others would get the same scores."""
        return is_exchangeable(self.task) and are_exchangeable(self.rewards.values())

    def examples(self, seed: int) -> Iterator[Example]:
        """The other task's examples, under this task's version."""
        for example in self.task.examples(seed):
            yield replace(example, key=replace(example.key, version=self.version))

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """What these rewards say. Raises TaskError."""
        return score_with(self.rewards, example, completions)


def as_task(given: Task | Draw | Rows, rewards: Sequence[RewardSpec] = ()) -> Task:
    """The task that a script means by an object.

    `given`: a Task; a function `examples(seed)`, as in a task file; or the examples themselves, which each
    seed draws in another order. `rewards`: what judges it, instead of the task's own judge or, where there is
    none, of exact match. Name and version follow from the source, so nodes that run one script exchange
    rollouts. Raises TaskError for what is no task.

    >>> task = as_task([("1+1=", "2"), ("2+2=", "4")])
    >>> sorted(example.prompt for example in task.examples(0))
    ['1+1=', '2+2=']
    """
    judges = named_rewards(rewards)
    if is_task(given):
        return rewarded(given, judges) if judges else given
    judges = judges or {"correct": load_reward("exact_match")}
    if callable(given):
        _require_seed(given)
        name = getattr(given, "__name__", "task")
        name = "task" if name in NAMELESS or not TASK_NAME.fullmatch(name) else name
        version = _digest([source_of(given), *map(source_of, judges.values())])
        return FileTask(name, version, _place_of(given), given, judges, are_exchangeable(judges.values()))
    if isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(given):
        version = _digest([_text_of(given), *map(source_of, judges.values())])
        draw = partial(_in_order, given, version)
        return FileTask("rows", version, Path("<rows>"), draw, judges, are_exchangeable(judges.values()))
    raise TaskError(
        f"{given!r:.80} is no task",
        hint="pass a name, a file, a function examples(seed), a list of examples, or an object with name,"
        " version, examples and score",
    )


def rewarded(task: Task, rewards: Mapping[str, Reward]) -> Task:
    """The same examples, judged by these rewards."""
    return RewardedTask(task, rewards, _digest([task.version, *map(source_of, rewards.values())]))


def source_of(function: Callable[..., Any]) -> str:
    """What a function does, as text: its source; where there is none, its byte code, which differs between
    versions of Python. Names outside of it that it uses are not followed."""
    if isinstance(function, RemoteReward):
        return function.version
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        if code is None:
            return f"{type(function).__module__}.{type(function).__qualname__}"
        return f"{code.co_code.hex()} {code.co_consts!r} {code.co_names!r}"


def _require_seed(draw: Draw) -> None:
    try:
        parameters = inspect.signature(draw).parameters
    except (TypeError, ValueError) as error:
        raise TaskError(f"{draw!r:.80} cannot be called: {error}") from error
    if not parameters:
        raise TaskError(
            f"{getattr(draw, '__name__', draw)!r:.80} takes no seed",
            hint="write: def examples(seed): yield prompt, answer",
        )


def _place_of(function: Callable[..., Any]) -> Path:
    """Where the function is written, for messages."""
    try:
        return Path(inspect.getsourcefile(function) or "<script>")
    except TypeError:
        return Path("<script>")


def _text_of(rows: Rows) -> str:
    try:
        return json.dumps(list(rows), ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"an example cannot be written as JSON: {error}",
            hint="peers compare tasks by their text: use texts, numbers, lists and dictionaries",
        ) from error


def _in_order(rows: Rows, version: str, seed: int) -> Iterator[Any]:
    """The rows in this seed's order, as those of a data set."""
    return (rows[number] for number in shuffled(f"rows/{version}/{seed}", len(rows)))


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()

"""Tasks and rewards that are objects of a running script rather than files: functions, rows, Task objects.

script -> [as_task] -> Task -> api.py -> a node

Their code runs in the node's own process, as nothing else could: a function of a notebook has no file that a
process of its own could load. Only what the script itself passes in ever gets here, nothing from the wire.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from swarmnode.errors import TaskError
from swarmnode.tasks.data import shuffled
from swarmnode.tasks.digests import digest_of_texts, judged_version, source_of
from swarmnode.tasks.loader import TASK_NAME, Draw, FileTask, environment_around, require_list
from swarmnode.tasks.rewards import (
    Reward,
    are_exchangeable,
    judge_groups,
    load_reward,
    named_rewards,
    score_with,
)
from swarmnode.tasks.task import Task, is_environment, is_exchangeable, is_task, levels_of
from swarmnode.types import Example

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
        """Whether the other task is, and others would get the same scores of single answers."""
        return is_exchangeable(self.task) and are_exchangeable(self.rewards)

    @property
    def levels(self) -> int:
        """As many levels as the other task has."""
        return levels_of(self.task)

    @property
    def judges_groups(self) -> bool:
        """Whether these rewards compare the answers of a group."""
        return judge_groups(self.rewards)

    def examples(self, seed: int) -> Iterator[Example]:
        """The other task's examples, under this task's version."""
        for example in self.task.examples(seed):
            yield replace(example, key=replace(example.key, version=self.version))

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """What these rewards say. Raises TaskError."""
        return score_with(self.rewards, example, completions)


def as_task(
    given: Task | Draw | Rows | None,
    rewards: Sequence[RewardSpec] = (),
    *,
    tools: Sequence[object] | None = None,
    environment: object = None,
) -> Task:
    """The task that a script means by an object.

    `given`: a Task; a function `examples(seed)`, as in a task file; or the examples themselves, which each
    seed draws in another order. `rewards`: what judges it, instead of the task's own judge or, where there is
    none, of exact match. `tools` and `environment`: as in a task file; an environment may bring its own
    questions (`given` None). Name and version follow from the source, so nodes that run one script exchange
    rollouts. Raises TaskError for what is no task.

    >>> task = as_task([("1+1=", "2"), ("2+2=", "4")])
    >>> sorted(example.prompt for example in task.examples(0))
    ['1+1=', '2+2=']
    """
    own = named_rewards(rewards)
    require_list(tools)
    if is_task(given):
        if tools is not None or environment is not None:
            raise TaskError(
                f"{given.name} is a task already", hint="pass its examples as a list or a function"
            )
        return rewarded(given, own) if own else given
    source = _source(given, own or {"correct": load_reward("exact_match")}, environment)
    if tools is None and environment is None:
        return source
    used = [*(tools or ()), *([] if environment is None else _factories(environment))]
    digest = digest_of_texts([source.version, *map(source_of, filter(callable, used))])
    return environment_around(replace(source, version=digest), tools, environment, {}, own=own)


def _factories(environment: Any) -> list[Any]:
    return [*environment.values()] if isinstance(environment, Mapping) else [environment]


def _source(given: Any, judges: Mapping[str, Reward], environment: object) -> FileTask:
    """What draws the examples. Raises TaskError."""
    if given is None and environment is not None:
        names = [getattr(one, "__name__", "") for one in _factories(environment)]
        name = names[0] if TASK_NAME.fullmatch(names[0]) else "environment"
        return FileTask(name, judged_version("", judges), Path("<script>"), None, judges)
    if callable(given):
        given = cast(Draw, given)
        _require_seed(given)
        name = getattr(given, "__name__", "task")
        name = "task" if name in NAMELESS or not TASK_NAME.fullmatch(name) else name
        version = judged_version(source_of(given), judges)
        return FileTask(name, version, _place_of(given), given, judges)
    rows = cast(Rows, given)
    if isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(rows):
        version = judged_version(_text_of(rows), judges)
        return FileTask("rows", version, Path("<rows>"), partial(_in_order, rows, version), judges)
    raise TaskError(
        f"{given!r:.80} is no task",
        hint="pass a name, a file, a function examples(seed), a list of examples, or an object with name,"
        " version, examples and score",
    )


def rewarded(task: Task, rewards: Mapping[str, Reward]) -> Task:
    """The same examples, judged by these rewards."""
    version = judged_version(task.version, rewards)
    if is_environment(task):
        from swarmnode.tasks.environments import RewardedEnvironment

        return RewardedEnvironment(task, rewards, version)
    return RewardedTask(task, rewards, version)


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

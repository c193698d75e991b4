"""A task as `swarmnode task show` prints it: name, version, rewards, and a few examples.

TasksConfig -> task_processes.py -> [descriptions_of] -> TaskDescription
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

from swarmnode.chat import Prompt, tools_of
from swarmnode.errors import TaskError
from swarmnode.node.building.task_processes import start_tasks
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.drawing.draw_digest import EXAMPLES_PER_SEED
from swarmnode.tasks.task import Task, holds_out, is_environment, is_exchangeable, score_strictly


@dataclass(frozen=True, slots=True)
class ShownExample:
    """One question, with the columns that its rewards get besides the answer."""

    prompt: Prompt
    columns: Mapping[str, Any]
    held_out: bool


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """A description of a task, made without training on it."""

    name: str
    version: str
    rewards: tuple[str, ...]
    """Names of the rewards that add up."""
    held_out_share: float
    """The share of the examples drawn here that no node trains on."""
    drawn: int
    exchangeable: bool
    """True if a peer with the same task can draw its examples again and judge their answers."""
    samples: tuple[ShownExample, ...]
    most_turns: int | None = None
    """Most turns of the policy. None: the task is no environment."""
    tools: tuple[str, ...] = ()
    """Names of the tools that its first example offers."""


def descriptions_of(config: TasksConfig, *, seed: int = 0, count: int = 5) -> list[TaskDescription]:
    """Returns descriptions of all tasks that the settings name, the code of files in processes of their own.
    Raises TaskError, JudgementLost.

    >>> len(descriptions_of(TasksConfig(names=("builtin",)), count=1))
    8
    """
    with ExitStack() as stack:
        tasks = start_tasks(stack, config.model_copy(update={"workers": 1}))
        return [description_of(task, seed=seed, count=count) for task in tasks.values()]


def description_of(task: Task, *, seed: int = 0, count: int = 5) -> TaskDescription:
    """Draws the examples of one seed and judges one answer. Raises TaskError.

    >>> from swarmnode.tasks.loader import load_task
    >>> description_of(load_task("rev")).rewards
    ('correct',)
    """
    drawn = list(islice(task.examples(seed), max(count, EXAMPLES_PER_SEED)))
    if not drawn:
        raise TaskError(f"task {task.name} has no example for seed {seed}", hint="try another --seed")
    # An empty answer is one that every judge can be asked about.
    rewards = tuple(score_strictly(task, drawn[0], [""])[0])
    held_out = [holds_out(task, example) for example in drawn]
    return TaskDescription(
        name=task.name,
        version=task.version,
        rewards=rewards,
        held_out_share=sum(held_out) / len(drawn),
        drawn=len(drawn),
        exchangeable=is_exchangeable(task),
        samples=tuple(
            ShownExample(example.prompt, example.columns, held)
            for example, held in zip(drawn[:count], held_out, strict=False)
        ),
        most_turns=task.most_turns if is_environment(task) else None,
        tools=tuple(tool["function"]["name"] for tool in tools_of(drawn[0].prompt)),
    )

"""The tasks of a node by their names, with what the settings say of them, and the processes of their code.

config -> [specs_of] -> names with options -> [start_tasks] -> tasks: built-in ones here, those of files in
                                                               processes that end with the run
tasks -> [tasks_for_strangers] -> the same tasks in processes of their own
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from swarmnode.errors import TaskError
from swarmnode.exchange.exchange_settings import STRANGERS_TIMEOUT_S
from swarmnode.exchange.limits import PLAY_S
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.loader import load_tasks
from swarmnode.tasks.processes.isolated_task import isolate
from swarmnode.tasks.specs import TaskKind, TaskSpec, parse_spec, with_defaults
from swarmnode.tasks.task import Isolated, Task

ABOUT_DATA: Mapping[str, str] = {
    "reward": "reward",
    "weight": "reward_weights",
    "judge": "judge",
    "prompt": "prompt_column",
    "answer": "answer_column",
    "system": "system_prompt",
    "evaluation": "evaluation",
}
"""Options of a data set's name, and the settings that stand for them."""


def start_tasks(stack: ExitStack, config: TasksConfig, home: Path | None = None) -> dict[str, Task]:
    """Load the tasks by name; the stack ends their processes. `home`: where the node lives. Raises
    TaskError."""
    load = partial(_isolate, config=config, home=home)
    tasks = {task.name: task for task in load_tasks(specs_of(config), load)}
    for task in tasks.values():
        if isinstance(task, Isolated):
            stack.enter_context(task)
    return tasks


def specs_of(config: TasksConfig) -> tuple[str, ...]:
    """The tasks' names with what the settings say of them. Raises TaskError for settings that are about tasks
    of a kind that is not there.

    >>> specs_of(TasksConfig(names=("rev", "q.jsonl"), reward=("numeric_match",)))
    ('rev', 'q.jsonl?reward=numeric_match')
    """
    about = [option for option, setting in ABOUT_DATA.items() if _value(config, setting)]
    if not about and not config.reasoning_gym and not config.curriculum:
        return config.names
    specs = [parse_spec(name) for name in config.names]
    for option in about:
        if not any(_takes(spec, option) for spec in specs):
            raise TaskError(
                f"tasks.{ABOUT_DATA[option]} is about data sets, and there is none",
                hint="tasks of files and packages bring prompts and rewards of their own",
            )
    gyms = {spec.name for spec in specs if spec.kind == TaskKind.GYM}
    if config.curriculum and not gyms:
        raise TaskError("tasks.curriculum is about reasoning-gym", hint="add --task reasoning-gym:NAME")
    if unused := config.reasoning_gym.keys() - gyms:
        name = min(unused)
        raise TaskError(
            f"tasks.reasoning_gym.{name} is about a task that is not there",
            hint=f"add --task reasoning-gym:{name}",
        )
    return tuple(str(with_defaults(spec, _said(config, spec))) for spec in specs)


def _takes(spec: TaskSpec, option: str) -> bool:
    """Returns True if an option of data sets is for this task."""
    return spec.kind in (TaskKind.DATA, TaskKind.HUB) or (spec.kind == TaskKind.GYM and option == "system")


def _value(config: TasksConfig, setting: str) -> str | tuple[str, ...]:
    """A setting as an option of a name says it; empty: it is not set."""
    if setting == "judge":
        return config.judge.model_dump_json(exclude_defaults=True) if config.judge.url else ""
    if setting == "reward_weights":
        return tuple(map(str, config.reward_weights))
    return getattr(config, setting)


def _said(config: TasksConfig, spec: TaskSpec) -> dict[str, tuple[str, ...]]:
    """Returns the settings about one task as options of its name."""
    said: dict[str, tuple[str, ...]] = {}
    for option, setting in ABOUT_DATA.items():
        value = _value(config, setting)
        if value and _takes(spec, option):
            said[option] = (value,) if isinstance(value, str) else value
    if spec.kind == TaskKind.GYM:
        parameters = config.reasoning_gym.get(spec.name, {})
        said.update({key: (json.dumps(value),) for key, value in parameters.items()})
        if config.curriculum:
            said["curriculum"] = ("true",)
    return said


def tasks_for_strangers(stack: ExitStack, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Returns the tasks to judge what others sent: an answer that hangs a reward holds up none of our own."""
    beside: dict[str, Task] = {}
    for name, task in tasks.items():
        if isinstance(task, Isolated):
            task = stack.enter_context(task.for_strangers(STRANGERS_TIMEOUT_S, PLAY_S))
        beside[name] = task
    return beside


def _isolate(spec: str, config: TasksConfig, home: Path | None) -> Task:
    return isolate(
        spec,
        config.score_timeout_s,
        unconfined=config.sandbox == "optional",
        workers=config.workers,
        memory_mb=config.memory_mb,
        turn_timeout_s=config.turn_timeout_s,
        home=home,
    )

"""The tasks of a run: built-in ones here, those of files in processes that end with the run.

run.py, runtime/run.py, offline.py -> [start_tasks] -> tasks/process.py
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from swarmnode.config import TasksConfig
from swarmnode.exchange.settings import ExchangeSettings
from swarmnode.tasks.loader import load_tasks
from swarmnode.tasks.task import Isolated, Task

STRANGERS_TIMEOUT_S = 0.75 * ExchangeSettings().score_timeout_s
"""Limit of judging the answers of a stranger: within the exchange's deadline, which counts tokenizing as
well."""


def start_tasks(stack: ExitStack, config: TasksConfig) -> dict[str, Task]:
    """Load the tasks by name; the stack ends their processes. Raises TaskError."""
    load = partial(_isolate, timeout_s=config.score_timeout_s)
    tasks = {task.name: task for task in load_tasks(config.names, load)}
    for task in tasks.values():
        if isinstance(task, Isolated):
            stack.enter_context(task)
    return tasks


def tasks_for_strangers(stack: ExitStack, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The same tasks for judging what others sent: an answer that hangs a reward holds up none of our own."""
    beside: dict[str, Task] = {}
    for name, task in tasks.items():
        if isinstance(task, Isolated):
            task = stack.enter_context(task.for_strangers(STRANGERS_TIMEOUT_S))
        beside[name] = task
    return beside


def _isolate(spec: str, timeout_s: float) -> Task:
    from swarmnode.tasks.process import isolate

    return isolate(spec, timeout_s)

"""The processes that run task code: some for our own answers, others for answers of strangers.

TasksConfig -> tasks/data_settings.py -> [start_tasks] -> tasks: built-in ones here, those of files in
                                                          processes that end with the run
tasks -> [tasks_for_strangers] -> the same tasks in processes of their own
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from swarmnode.exchange.exchange_settings import STRANGERS_TIMEOUT_S
from swarmnode.exchange.limits import PLAY_S
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.data_settings import specs_of
from swarmnode.tasks.loader import load_tasks
from swarmnode.tasks.processes.isolated_task import isolate_as_set
from swarmnode.tasks.task import Isolated, Task


def start_tasks(stack: ExitStack, config: TasksConfig, home: Path | None = None) -> dict[str, Task]:
    """Loads the tasks and returns them by name; the stack ends their processes. `home`: the node's folder.
    Raises TaskError."""

    def load(spec: str) -> Task:
        task = isolate_as_set(spec, config, home=home)
        return stack.enter_context(task) if isinstance(task, Isolated) else task

    return {task.name: task for task in load_tasks(specs_of(config), load)}


def tasks_for_strangers(stack: ExitStack, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Returns the tasks that judge what others sent: an answer that hangs a reward delays none of ours."""
    beside: dict[str, Task] = {}
    for name, task in tasks.items():
        if isinstance(task, Isolated):
            task = stack.enter_context(task.for_strangers(STRANGERS_TIMEOUT_S, PLAY_S))
        beside[name] = task
    return beside

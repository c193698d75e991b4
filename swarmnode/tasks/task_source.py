"""Registered kinds of tasks, which stand before the colon of a task's name.

reasoning-gym:NAME -> registry.find("task", ...) -> [task_source] -> TaskSource -> loader.py, data_settings.py

The core knows its data sets; every other kind belongs to an extension or an installed package.
"""

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.registry import find
from swarmnode.tasks.specs import TaskKind, TaskSpec
from swarmnode.tasks.task import Task


@dataclass(frozen=True, slots=True)
class TaskSource:
    """A kind of task: how to load one, and what is known about it before."""

    load: Callable[[TaskSpec], Task]
    means: str = "a task of an installed package"
    """Description for `swarmnode task list`."""
    written: str = "NAME"
    """Form of the text after the colon."""
    needs: str | None = None
    """The package, by its import name, without which none can be loaded."""
    options: frozenset[str] = frozenset()
    """Options that settings about data sets also give to its tasks (data_settings.ABOUT_DATA)."""
    same_hashes: bool = False
    """True if its tasks draw in the order of a set, so that strings must hash alike in all processes."""


def task_source(kind: str) -> TaskSource:
    """Returns the source of this name. A registered plain function is its loader. Raises ConfigError if none
    is registered."""
    found = find("task", TaskKind.HUB if kind == TaskKind.DATA else kind)
    return found if isinstance(found, TaskSource) else TaskSource(found)

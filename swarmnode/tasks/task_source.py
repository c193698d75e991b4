"""Kinds of tasks that stand before the colon of a task's name, as whoever brings one registers it.

reasoning-gym:NAME -> registry.find("task", ...) -> [task_source] -> TaskSource -> loader.py, data_settings.py

The heart knows its data sets; every other kind is an extension's, or an installed package's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.registry import find
from swarmnode.tasks.specs import TaskKind, TaskSpec
from swarmnode.tasks.task import Task


@dataclass(frozen=True, slots=True)
class TaskSource:
    """A kind of task: how one is loaded, and what may be known of it before."""

    load: Callable[[TaskSpec], Task]
    means: str = "a task of an installed package"
    """For `swarmnode task list`."""
    written: str = "NAME"
    """Form of what stands behind the colon."""
    needs: str | None = None
    """The package, as it is imported, without which none can be loaded."""
    options: frozenset[str] = frozenset()
    """Options that settings about data sets give to its tasks, too (data_settings.ABOUT_DATA)."""
    same_hashes: bool = False
    """True if its tasks draw in the order of a set, so that strings must hash alike in all processes."""


def task_source(kind: str) -> TaskSource:
    """Returns the source of this name. A plain function is one that loads. Raises ConfigError if nobody
    registers it."""
    found = find("task", TaskKind.HUB if kind == TaskKind.DATA else kind)
    return found if isinstance(found, TaskSource) else TaskSource(found)

"""The seam of environments: turns functions and classes of the user into tasks that answer back.

loader.py, script_objects.py -> tools, environment -> [environments] -> registry.py -> task.Environment

A Task object that answers back by itself (task.Environment) needs none of this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from swarmnode.chat import Said
from swarmnode.errors import TaskError
from swarmnode.registry import find
from swarmnode.tasks.task import Task
from swarmnode.types import Example


@dataclass(frozen=True, slots=True)
class EnvironmentMaker:
    """The functions of an extension that make tasks from tools and environments."""

    around: Callable[..., Task]
    """Called with a FileTask, tools, an environment, further settings of the file and `own`, the user's
    rewards. Returns a task with that environment around its questions."""
    rewarded: Callable[..., Task]
    """Called with an environment, rewards and a version. Returns the environment, judged by these rewards."""
    final_answers: Callable[[Example, Sequence[Said]], list[str]]
    """Returns the policy's last message of each episode, as rewards read it."""


def environments() -> EnvironmentMaker:
    """Returns the maker of environments. Raises ConfigError if no extension provides one."""
    return find("environment", "turns")


def listed(tools: object) -> Sequence[object]:
    """Returns the tools of a file or a script. Raises TaskError if they are not a list."""
    if not isinstance(tools, list | tuple):
        raise TaskError(
            f"tools must be a list, got {tools!r:.80}",
            hint="write a list of functions: tools = [add, look_up]",
        )
    return cast(Sequence[object], tools)

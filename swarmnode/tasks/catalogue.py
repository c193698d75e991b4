"""What --task takes: the tasks that come with swarmnode, and the other forms that its loader reads.

`swarmnode task list` -> [builtin_tasks, task_forms]

A form is listed where the module that reads it is there: the list promises no more than the loader keeps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.task import Task


@dataclass(frozen=True, slots=True)
class TaskForm:
    """One way to name a task."""

    written: str
    means: str
    read_by: str
    """The module of swarmnode that reads it."""
    needs: str | None = None
    """The package, as it is imported, without which this form cannot be loaded."""

    @property
    def installed(self) -> bool:
        """Whether the package that it needs is there."""
        return self.needs is None or find_spec(self.needs) is not None


_LOADER = "swarmnode.tasks.loader"

_FORMS = (
    TaskForm("NAME", "one of the tasks above", _LOADER),
    TaskForm("builtin", "all procedural tasks above at once", _LOADER),
    TaskForm("FILE.py", "a file with examples(seed): `swarmnode task new FILE.py` writes one", _LOADER),
    TaskForm(
        "package.module:attribute", "a task object or a function examples(seed)", "swarmnode.tasks.imported"
    ),
    TaskForm("FILE.jsonl", "a data set with a question a row; .csv as well", "swarmnode.tasks.data"),
    TaskForm("FILE.parquet", "the same as Parquet", "swarmnode.tasks.data", "pyarrow"),
    TaskForm("FOLDER", "what `datasets` saved to disk", "swarmnode.tasks.data", "datasets"),
    TaskForm("hf:OWNER/NAME", "a data set of the Hugging Face hub", "swarmnode.tasks.hub", "datasets"),
    TaskForm("reasoning-gym:NAME", "a data set of reasoning-gym", "swarmnode.tasks.gym", "reasoning_gym"),
    TaskForm("verifiers:NAME", "a taskset of verifiers", "swarmnode.tasks.tasksets", "verifiers"),
)

_PUZZLES = "swarmnode.tasks.puzzles"


def builtin_tasks() -> tuple[Task, ...]:
    """Every task that needs nothing but its name.

    >>> builtin_tasks()[0].name
    'rev'
    """
    puzzles = import_module(_PUZZLES).PUZZLES if find_spec(_PUZZLES) else ()
    return (*BUILTIN_TASKS, *puzzles)


def task_forms() -> Iterator[TaskForm]:
    """The forms of a task's name that this version reads."""
    return (form for form in _FORMS if find_spec(form.read_by) is not None)

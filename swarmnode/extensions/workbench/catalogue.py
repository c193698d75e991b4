"""The values of --task: the tasks that come with swarmnode, and the other forms that its loader reads.

`swarmnode task list` -> [builtin_tasks, task_forms]
"""

from dataclasses import dataclass
from importlib.util import find_spec

from swarmnode.registry import names
from swarmnode.tasks.builtin import builtin_names, builtin_task
from swarmnode.tasks.task import Task
from swarmnode.tasks.task_source import task_source


@dataclass(frozen=True, slots=True)
class TaskForm:
    """One way to name a task."""

    written: str
    means: str
    needs: str | None = None
    """The package, as it is imported, without which this form cannot be loaded."""

    @property
    def installed(self) -> bool:
        """True if the package that this form needs is installed."""
        return self.needs is None or find_spec(self.needs) is not None


TASK_FORMS = (
    TaskForm("NAME", "one of the tasks above"),
    TaskForm("builtin", "all procedural tasks above at once"),
    TaskForm("FILE.py", "a file with examples(seed): `swarmnode task new FILE.py` writes one"),
    TaskForm("package.module:attribute", "a task object or a function examples(seed)"),
    TaskForm("FILE.jsonl", "a data set with a question a row; .csv as well"),
    TaskForm("FILE.parquet", "the same as Parquet", "pyarrow"),
    TaskForm("FOLDER", "what `datasets` saved to disk", "datasets"),
)
"""The forms of a task's name without a kind before a colon."""


def task_forms() -> tuple[TaskForm, ...]:
    """Returns the forms of a task's name, those with a registered kind behind the others."""
    sources = {kind: task_source(kind) for kind in names("task")}
    return (
        *TASK_FORMS,
        *(TaskForm(f"{kind}:{one.written}", one.means, one.needs) for kind, one in sources.items()),
    )


def builtin_tasks() -> tuple[Task, ...]:
    """Returns every task that needs nothing but its name.

    >>> builtin_tasks()[0].name
    'rev'
    """
    return tuple(task for name in builtin_names() if (task := builtin_task(name)) is not None)

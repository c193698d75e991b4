"""The values of --task: the tasks that come with swarmnode, and the other forms that its loader reads.

`swarmnode task list` -> [builtin_tasks, TASK_FORMS]
"""

from dataclasses import dataclass
from importlib.util import find_spec

from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.kinds.puzzles import PUZZLES
from swarmnode.tasks.task import Task


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
    TaskForm("hf:OWNER/NAME", "a data set of the Hugging Face hub", "datasets"),
    TaskForm("reasoning-gym:NAME", "a data set of reasoning-gym", "reasoning_gym"),
    TaskForm("verifiers:NAME", "a taskset of verifiers", "verifiers"),
)
"""The forms of a task's name that the loader reads."""


def builtin_tasks() -> tuple[Task, ...]:
    """Returns every task that needs nothing but its name.

    >>> builtin_tasks()[0].name
    'rev'
    """
    return (*BUILTIN_TASKS, *PUZZLES)

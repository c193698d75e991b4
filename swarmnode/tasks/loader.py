"""Loads tasks by the name a user types: one of ours, or ten lines of Python in a file.

"rev" | "builtin" | "path/to/my_task.py" -> [load_tasks] -> draw_round

A task file has at most three functions, the last two optional:

    def examples(seed):                      # the same examples for the same seed, on every machine
        for number in range(100):
            yield f"{number} + {seed % 10} =", str(number + seed % 10)

    def reward(completions, answer, **columns):    # TRL's contract; without it: exact match with the answer
        return [1.0 if c.strip() == a else 0.0 for c, a in zip(completions, answer)]

    def version():                           # only when the examples depend on more than this file
        return "questions.jsonl of 2025-01-07"

`examples` yields a (prompt, answer) pair, a dictionary with "prompt" and any other columns, or a bare prompt.
A prompt is a text or a list of messages that ends with one of the user, such as
[{"role": "system", "content": "..."}, {"role": "user", "content": "..."}]. Then rewards get messages too.
Further functions named `reward_...` add to the reward; a list such as `reward_weights = [1, 0.5]` sets their
weights, in the order of the file. The task is named after the file.

`exchangeable = False` in a file keeps its rollouts at home: no other node could draw its examples again.
With `tools = [function, ...]` or `environment = Class` a file is an environment (environment_maker.py), which
stays at home unless it says `exchangeable = True`.

A file need not care about threads or other files. Its author may assume a single thread: `random.seed(seed)`,
a parser at the top of the file, a connection. Each file has processes of its own, in each of which one thread
calls it (isolated_task.py). The functions of a script run in the node, which draws and scores its own
rollouts while it judges those of others: there one thread at a time runs their code. In both cases every draw
runs from beginning to end before anything else does, so even a draw from `random.seed(seed)` is the same on
every node.
"""

import difflib
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import cast

from swarmnode import registry
from swarmnode.errors import TaskError
from swarmnode.tasks.builtin import BUILTIN_TASKS, BuiltinTask, builtin_names, builtin_task
from swarmnode.tasks.digests import digest_of_texts, sources_beside
from swarmnode.tasks.environment_maker import environments, listed
from swarmnode.tasks.file_task import Draw, FileTask, require_seed
from swarmnode.tasks.judging.conventions import adapted
from swarmnode.tasks.judging.rewards import Reward, load_reward, with_weights
from swarmnode.tasks.kinds.imported import find_attribute, task_of
from swarmnode.tasks.source_file import load_source, of_theirs
from swarmnode.tasks.specs import DATA_SUFFIXES, TaskKind, TaskSpec, parse_spec
from swarmnode.tasks.task import Isolated, Task
from swarmnode.tasks.task_source import task_source

ALL_BUILTIN = "builtin"
"""Spec that stands for every built-in task."""

TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Pattern of task names, which travel in headers and metrics."""


def load_tasks(
    specs: Iterable[str], load: Callable[[str], Task] = lambda spec: load_task(spec)
) -> tuple[Task, ...]:
    """Loads several tasks, where `builtin` stands for all eight of ours. Raises TaskError if two share a
    name. `load`: loads each one; by default into this process, in a node into others (isolated_task.py).

    >>> [task.name for task in load_tasks(["rev", "sort"])]
    ['rev', 'sort']
    """
    tasks: dict[str, Task] = {}
    for spec in specs:
        for task in BUILTIN_TASKS if spec == ALL_BUILTIN else (builtin_task(spec) or load(spec),):
            if task.name in tasks:
                raise TaskError(f"two tasks are named {task.name}", hint="name each task once")
            tasks[task.name] = task
    if not tasks:
        raise TaskError("no task to train on", hint=f"name one, or {ALL_BUILTIN} for all built-in ones")
    return tuple(tasks.values())


def load_task(spec: str, text: str | None = None) -> Task:
    """Loads one task: a built-in one, a Python file (`text`: its content when it was first read), or the
    object at an import path.

    >>> load_task("rev").version
    '1'
    """
    if (builtin := builtin_task(spec)) is not None:
        return builtin
    asked = parse_spec(spec)
    match asked.kind:
        case TaskKind.FILE:
            return _named(_load_file(Path(asked.name), text))
        case TaskKind.IMPORT:
            return _load_import(asked)
        case TaskKind.BUILTIN:
            raise _unknown(spec)
        case kind:
            return _named(task_source(kind).load(asked))


def spec_of(task: Task) -> str | None:
    """Returns the spec by which `load_task` finds this task again from any folder of this machine. None: it
    did not come from a file."""
    if isinstance(task, Isolated):
        return task.spec
    return task.name if isinstance(task, BuiltinTask) else None


def _unknown(spec: str) -> TaskError:
    close = difflib.get_close_matches(spec, builtin_names(), n=1)
    if close:
        hint = f"did you mean {close[0]}?"
    elif ":" in spec:
        hint = f"task kinds are {', '.join(registry.names('task'))}; see `swarmnode task list`"
    else:
        hint = (
            f"built-in tasks: {', '.join(builtin_names())}; or pass a .py file, package.module:attribute, or"
            f" a data set ({', '.join(DATA_SUFFIXES)})"
        )
    return TaskError(f"there is no task {spec!r}", hint=hint)


def _load_import(asked: TaskSpec) -> Task:
    asked.only()
    found = find_attribute(asked.name)
    if inspect.isclass(found.value) and hasattr(found.value, "reset"):
        draw = vars(found.module).get("examples")
        return _named(_task_of(found.module, found.name, found.digest, found.path, draw, found.value))
    task = task_of(found)
    if task is not None:
        return _named(task)
    if not inspect.isfunction(found.value) or not inspect.signature(found.value).parameters:
        raise TaskError(
            f"{asked.name} is not a task",
            hint="name an object with name, version, examples and score, or a function examples(seed)",
        )
    return _named(_task_of(found.module, found.name, found.digest, found.path, found.value))


def _named(task: Task) -> Task:
    """Returns the task if its name is valid in headers and metrics, else raises TaskError."""
    if not TASK_NAME.fullmatch(task.name):
        raise TaskError(f"invalid task name {task.name!r}", hint="use letters, digits, dots, - and _")
    return task


def _load_file(path: Path, text: str | None) -> Task:
    source = load_source(path, text)
    return _task_of(source.module, path.stem, source.digest, path, vars(source.module).get("examples"))


def _task_of(
    module: ModuleType, name: str, digest: str, path: Path, draw: object, environment: object = None
) -> Task:
    """Returns the task that a module describes: an environment if it has tools or names an environment."""
    named = (_assigned(module, name) for name in ("environment", "environment_factory"))
    environment = environment or next((one for one in named if one is not None), None)
    given = _assigned(module, "tools")
    tools = None if given is None else listed(given)
    if environment is None or draw is not None:
        require_seed(draw, path)
    version = _version(module, digest, path)
    found = _own_rewards(module)
    rewards = found or {"correct": load_reward("exact_match")}
    if environment is None and tools is None:
        may_leave = bool(vars(module).get("exchangeable", True))
        return FileTask(name, version, path, cast(Draw, draw), rewards, may_leave)
    return environments().around(
        FileTask(name, version, path, cast(Draw, draw), rewards), tools, environment, vars(module), own=found
    )


def _assigned(module: ModuleType, name: str) -> object:
    """Returns the value of a name in a file, or None if it is unset or an imported module."""
    found: object = vars(module).get(name)
    return None if isinstance(found, ModuleType) else found


def _own_rewards(module: ModuleType) -> dict[str, Reward]:
    """Returns `reward` and every `reward_<name>` of the file."""
    if inspect.isfunction(vars(module).get("score")):
        raise TaskError(
            "the file defines score(), which a task file does not use",
            hint="name it reward(completions, **columns) and return one number for each completion",
        )
    found = {
        name.removeprefix("reward_"): adapted(function)
        for name, function in vars(module).items()
        if (name == "reward" or name.startswith("reward_")) and callable(function)
    }
    return with_weights(found, vars(module).get("reward_weights", ()))


def _version(module: ModuleType, digest: str, path: Path) -> str:
    """Returns the digest of the source, combined with that of the files beside it that it imports and with
    the value of its own `version()`."""
    if beside := sources_beside(module):
        digest = digest_of_texts([digest, *beside])
    version = vars(module).get("version")
    if not callable(version):
        return digest
    said = of_theirs(f"{path}: version() failed", lambda: str(version()))
    return hashlib.blake2b(f"{digest}/{said}".encode(), digest_size=8).hexdigest()

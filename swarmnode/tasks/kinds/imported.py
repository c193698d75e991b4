"""Tasks by import path: an object, a class or a function of an installed package, of a module in the folder
where a node is started, or of a file.

package.module:attribute -> [find_attribute] -> loader.py -> ImportedTask, or FileTask of a function

As with files, only what the user named is imported, in the process that runs the task's code.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from swarmnode.chat import Message, Said, Turn
from swarmnode.errors import TaskError, where
from swarmnode.tasks.rows import read_row
from swarmnode.tasks.source_file import load_source, of_theirs, read_source
from swarmnode.tasks.task import TaskAround, is_environment, is_task
from swarmnode.types import Example, ExampleKey

_END = object()


@dataclass(frozen=True, slots=True)
class Attribute:
    """The object that an import path names, with its module."""

    spec: str
    value: Any
    module: ModuleType
    path: Path
    """The module's file."""
    digest: str
    """Digest of the module's text. Files that it imports do not count."""

    @property
    def name(self) -> str:
        """Name of a task that has none of its own: its function's, or its module's if the attribute is
        `examples`."""
        attribute = self.spec.rpartition(":")[2]
        return self.path.stem if attribute == "examples" else attribute


def find_attribute(spec: str) -> Attribute:
    """Imports the object of `package.module:attribute` or `file.py:attribute`. Raises TaskError."""
    origin, _, name = spec.rpartition(":")
    if origin.endswith(".py"):
        source = load_source(Path(origin))
        module, path, digest = source.module, source.path, source.digest
    else:
        module = import_module(origin)
        path = Path(module.__file__ or origin)
        digest = hashlib.blake2b(text_of(module).encode(), digest_size=8).hexdigest()
    value = of_theirs(f"cannot import {name} of {origin}", lambda: getattr(module, name, _END))
    if value is _END:
        raise TaskError(
            f"{origin} has no attribute {name!r}", hint="name a task, or a function examples(seed)"
        )
    return Attribute(spec, value, module, path, digest)


def import_module(name: str) -> ModuleType:
    """Returns a module that is installed or in the working folder; an installed one comes first. Raises
    TaskError."""
    here = look_here_too()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        ours = error.name is not None and f"{name}.".startswith(f"{error.name}.")
        hint = f"install it, or run this in its folder; searched {here}" if ours else where(error)
        raise TaskError(f"cannot import {name}: {error}", hint=hint) from error
    except (Exception, SystemExit) as error:
        raise TaskError(f"cannot import {name}: {error!r}", hint=where(error)) from error


def look_here_too() -> str:
    """Appends the working folder to the import path, after installed packages. Returns the folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return here


@dataclass(frozen=True, slots=True)
class ImportedTask(TaskAround):
    """A Task object of the user, with examples and errors in the same form as ours."""

    spec: str
    task: Any
    version: str
    """As it was when the object was found: it may be computed, and is asked for with each example."""

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields the object's own examples; rows as in a task file become examples. Raises TaskError."""
        rows = self._called(f"examples({seed})", lambda: iter(self.task.examples(seed)))
        index = 0
        while (row := self._called(f"examples({seed})", lambda: next(rows, _END))) is not _END:
            key = ExampleKey(self.name, self.version, seed, index)
            yield replace(row, key=key) if isinstance(row, Example) else read_row(row, key, self.spec)
            index += 1

    def score(self, example: Example, completions: Sequence[Said]) -> list[Mapping[str, float | None]]:
        """Returns the object's scores. Raises TaskError."""
        return self._called("score()", lambda: list(self.task.score(example, completions)))

    def _called(self, what: str, call: Callable[[], Any]) -> Any:
        return of_theirs(f"{self.spec}: {what} failed", call)


class ImportedEnvironment(ImportedTask):
    """A Task object of the user that answers back."""

    @property
    def most_turns(self) -> int:
        """Most turns of the policy, as the object states them."""
        return int(self.task.most_turns)

    def observe(self, example: Example, turns: Sequence[Turn]) -> tuple[Message, ...] | None:
        """Returns the object's answer. Raises TaskError."""
        return self._called("observe()", lambda: self.task.observe(example, turns))


def task_of(found: Attribute) -> ImportedTask | None:
    """Returns the task that an attribute is or makes: an object, a class, or a function without arguments.
    None: it is something else. Raises TaskError."""
    task = _made(found)
    if not is_task(task):
        return None
    kind = ImportedEnvironment if is_environment(task) else ImportedTask
    return kind(found.spec, task, str(task.version))


def _made(found: Attribute) -> Any:
    value = found.value
    if not inspect.isclass(value) and (not inspect.isfunction(value) or inspect.signature(value).parameters):
        return value
    return of_theirs(f"{found.spec}() failed", value)


def text_of(module: ModuleType) -> str:
    """Returns the text of a module's file; for a compiled one, its bytes as hexadecimal digits."""
    path = Path(module.__file__ or module.__name__)
    try:
        return read_source(path)
    except TaskError:
        return path.read_bytes().hex() if path.is_file() else str(path)

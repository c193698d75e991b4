"""The value of --task, parsed: a name, a kind of source, and options."""

import os.path
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qsl, quote

from swarmnode.errors import TaskError
from swarmnode.registry import IMPORT_PATH, names
from swarmnode.tasks.builtin import builtin_names
from swarmnode.tasks.judging.conventions import split_convention

DATA_SUFFIXES = (".jsonl", ".csv", ".parquet")
"""Files with these endings are data sets."""

JUDGED_ELSEWHERE = ("",)
"""Value of the option `reward` for a data set without a judge; the code that sets it provides one."""


class TaskKind(StrEnum):
    """The kinds of source that are ours. Others are registered by name (task_source.py)."""

    BUILTIN = "builtin"
    FILE = "file"
    IMPORT = "import"
    DATA = "data"
    HUB = "hf"


OWN_KINDS = (TaskKind.BUILTIN, TaskKind.FILE, TaskKind.IMPORT)
"""Kinds that the loader knows by itself. All others are sources of task_source.py."""

WITHOUT_PREFIX = (*OWN_KINDS, TaskKind.DATA)
"""Kinds without a prefix. All others stand before a colon."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task's name as it was typed, parsed."""

    kind: str
    """A TaskKind, or one that an extension or an installed package registers."""
    name: str
    """The spec without its options and its prefix, if any."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def __str__(self) -> str:
        prefix = "" if self.kind in WITHOUT_PREFIX else f"{self.kind}:"
        return prefix + self.name + _query(self.options)

    @property
    def short(self) -> str:
        """Name of the task in messages before it is loaded."""
        if self.kind == TaskKind.IMPORT:
            return self.name.rpartition(":")[2]
        return Path(self.name).stem

    @property
    def path(self) -> str:
        """Path of the file or folder, for kinds that have one."""
        return self.name.rpartition(":")[0] if ".py:" in self.name else self.name

    def one(self, key: str) -> str | None:
        """Returns the value of an option that may be given once. Raises TaskError if it is given more
        often."""
        values = self.options.get(key, ())
        if len(values) > 1:
            raise TaskError(f"{self} has {key} {len(values)} times", hint="pass it once")
        return values[0] if values else None

    def flag(self, key: str) -> bool:
        """Returns an option that is true or false; false if it is not given. Raises TaskError for any other
        value."""
        value = self.one(key) or "false"
        if value not in ("true", "false"):
            raise TaskError(f"{self}: {key} is {value!r}", hint="write true or false")
        return value == "true"

    def only(self, *known: str) -> None:
        """Raises TaskError if an option is none of these."""
        for key in self.options.keys() - set(known):
            hint = f"options are {', '.join(known)}" if known else "this kind of task has no options"
            raise TaskError(f"{self} has an unknown option {key!r}", hint=hint)


def parse_spec(spec: str) -> TaskSpec:
    """Parses a spec. Looks at the disk only to tell a folder from a mistyped name.

    >>> parse_spec("data/gsm8k.jsonl?reward=numeric_match").options
    {'reward': ('numeric_match',)}
    >>> str(parse_spec("hf:openai/gsm8k:test")), parse_spec("./my.py").kind
    ('hf:openai/gsm8k:test', <TaskKind.FILE: 'file'>)
    """
    before, colon, rest = spec.partition(":")
    if colon and before in names("task"):
        name, options = _split(rest)
        return TaskSpec(before, name, options)
    if spec.endswith(".py"):
        return TaskSpec(TaskKind.FILE, spec)
    name, options = _split(spec)
    if name.endswith(DATA_SUFFIXES):
        return TaskSpec(TaskKind.DATA, name, options)
    if IMPORT_PATH.fullmatch(name) or ".py:" in name:
        return TaskSpec(TaskKind.IMPORT, name, options)
    # A folder with the name of a built-in task is written ./NAME.
    if "/" in name or (os.path.isdir(name) and not _is_ours(name)):
        return TaskSpec(TaskKind.DATA, name, options)
    return TaskSpec(TaskKind.BUILTIN, spec)


def names_a_task(text: str) -> bool:
    """Returns True if a text, which may be a prompt, is the name of an existing task.

    >>> names_a_task("rev"), names_a_task("a.b:c"), names_a_task("gone.jsonl"), names_a_task("1/2 + 1/2 =")
    (True, True, False, False)
    """
    try:
        asked = parse_spec(text)
    except TaskError:
        return False
    match asked.kind:
        case TaskKind.BUILTIN:
            return _is_ours(text)
        case TaskKind.FILE | TaskKind.DATA:
            return os.path.exists(os.path.expanduser(asked.name))
        case _:
            return ".py:" not in text or os.path.exists(os.path.expanduser(asked.path))


def _is_ours(name: str) -> bool:
    return name in ("builtin", *builtin_names())


def absolute(spec: TaskSpec) -> TaskSpec:
    """Returns a spec with the same meaning in any folder. Import paths of packages stay as they are."""
    match spec.kind:
        case TaskKind.FILE | TaskKind.DATA:
            name = str(Path(spec.name).expanduser().absolute())
        case TaskKind.IMPORT if ".py:" in spec.name:
            path, _, attribute = spec.name.rpartition(":")
            name = f"{Path(path).expanduser().absolute()}:{attribute}"
        case _:
            name = spec.name
    options = dict(spec.options)
    if measured := options.get("evaluation"):
        options["evaluation"] = tuple(str(absolute(parse_spec(one))) for one in measured)
    if rewards := options.get("reward"):
        options["reward"] = tuple(map(absolute_reward, rewards))
    return TaskSpec(spec.kind, name, options)


def absolute_reward(reward: str) -> str:
    """Returns the name of a reward with the same meaning in any folder; a prefix such as `verl:` may precede
    a file.

    >>> absolute_reward("numeric_match"), absolute_reward("verl:/a/rw.py:f")
    ('numeric_match', 'verl:/a/rw.py:f')
    """
    convention, path = split_convention(reward)
    file, colon, function = path.rpartition(":")
    if not file.endswith(".py") or "://" in file:
        return reward
    whole = f"{Path(file).expanduser().absolute()}{colon}{function}"
    return f"{convention}:{whole}" if convention else whole


def with_defaults(spec: TaskSpec, options: Mapping[str, Iterable[str]]) -> TaskSpec:
    """Returns the spec with these options, except those that it sets itself; empty ones are left out."""
    given = {key: tuple(values) for key, values in options.items()}
    return TaskSpec(
        spec.kind, spec.name, {**{key: value for key, value in given.items() if value}, **spec.options}
    )


def judged_elsewhere(spec: str) -> str:
    """Returns the spec without a judge if it is a data set: `Node("questions.jsonl", reward=f)` brings one.

    >>> judged_elsewhere("questions.jsonl?reward=numeric_match"), judged_elsewhere("rev")
    ('questions.jsonl?reward=', 'rev')
    """
    asked = parse_spec(spec)
    if asked.kind not in (TaskKind.DATA, TaskKind.HUB):
        return spec
    return str(TaskSpec(asked.kind, asked.name, {**asked.options, "reward": JUDGED_ELSEWHERE}))


def _split(spec: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    name, _, query = spec.rpartition("?") if "?" in spec else (spec, "", "")
    options: dict[str, tuple[str, ...]] = {}
    try:
        # Names of columns and files may contain a plus, which a web form would read as a space.
        query = query.replace("+", "%2B")
        for key, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
            options[key] = (*options.get(key, ()), value)
    except ValueError as error:
        raise TaskError(
            f"the options of {spec!r} cannot be read",
            hint="write NAME?key=value&key=value, and in a value %26 for &, %3F for ?",
        ) from error
    return name, options


def _query(options: Mapping[str, tuple[str, ...]]) -> str:
    pairs = [
        f"{quote(key)}={quote(value, safe='/:.,~')}" for key, values in options.items() for value in values
    ]
    return f"?{'&'.join(pairs)}" if pairs else ""

"""All parts that a setting or a command can name, in one table; each is imported on first use.

config, command line -> [find, find_called, made] -> engine, transport, learner, loss, rule, task kind ...

A part is named by a built-in name (in `SEAMS` or in the `PARTS` of a folder of extensions/), by
`module:attribute`, or by a name that an installed package registers as an entry point of the group
`swarmnode.<kind>`. Built-in names cannot be replaced. docs/extending.md has an example of each.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from operator import attrgetter
from pkgutil import iter_modules
from typing import Any, Literal, TypeVar

from swarmnode.errors import ConfigError, SwarmnodeError, where

logger = logging.getLogger(__name__)

Kind = Literal[
    "engine", "transport", "learner", "loss", "rule", "task", "reward", "judge", "monitor", "command",
    "run", "page", "panel", "reach", "rollouts", "local_peers", "caller", "guard", "check", "kernels",
    "contribution", "receipts", "admission", "environment", "model", "convention", "names", "builtin",
]  # fmt: skip
Part = TypeVar("Part")
Parts = Mapping[Kind, Mapping[str, str]]
"""Import paths by kind and name: the `PARTS` that each folder of extensions/ registers."""

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""`package.module:name`, the import path of a user's own part."""

FILE_PATH = re.compile(r"(.*/)?(?P<module>\w+)\.py:(?P<attribute>\w+)")
"""`folder/module.py:name`, which is not a valid name of a part."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A place for a part, and the parts for it that the core of swarmnode includes."""

    said_by: str
    """The setting, flag or command that names the part."""
    ours: Mapping[str, str]
    """The import paths of these parts by name."""


SEAMS: Mapping[Kind, Seam] = {
    "engine": Seam("rollout.engine", {"embedded": "swarmnode.rollout.decode.embedded_record:EMBEDDED"}),
    "transport": Seam("network.transport", {"p2pd": "swarmnode.network.daemon.p2pd_host:P2pdHost"}),
    "learner": Seam("node.learner", {"local": "swarmnode.node.policy_learner:PolicyLearner"}),
    "loss": Seam(
        "training.loss",
        {
            "grpo": "swarmnode.training.losses:GRPO",
            "dr_grpo": "swarmnode.training.losses:DR_GRPO",
            "dapo": "swarmnode.training.losses:DAPO",
            "gspo": "swarmnode.training.losses:GSPO",
            "cispo": "swarmnode.training.losses:CISPO",
            "rloo": "swarmnode.training.losses:RLOO",
        },
    ),
    "rule": Seam(
        "exchange.rule",
        {
            "sapo": "swarmnode.training.rules.rules:Sapo",
            "successes": "swarmnode.training.rules.rules:Successes",
            "book": "swarmnode.training.rules.book_rule:BookRule",
            "own_book": "swarmnode.training.rules.book_rule:OwnBook",
        },
    ),
    "task": Seam("--task", {"hf": "swarmnode.tasks.kinds.data:DATA_SETS"}),
    "model": Seam("policy.model", {}),
    "builtin": Seam("--task", {}),
    "convention": Seam("tasks.reward", {}),
    "names": Seam("settings", {}),
    "environment": Seam("tools", {}),
    "reward": Seam("tasks.reward", {"majority_vote": "swarmnode.tasks.judging.votes:majority_vote"}),
    "judge": Seam("tasks.judge", {}),
    "monitor": Seam("node.monitors", {}),
    # Each is a function, or an app with its own commands.
    "command": Seam(
        "swarmnode",
        {
            "join": "swarmnode.cli.join:join",
            "status": "swarmnode.cli.status:status",
            "version": "swarmnode.cli.app:version",
        },
    ),
    "run": Seam("join", {"alone": "swarmnode.node.building.run:run_node"}),
    "page": Seam("node.page", {}),
    "panel": Seam("join", {}),
    "reach": Seam("join", {}),
    "rollouts": Seam("join", {}),
    "local_peers": Seam("network.mdns", {}),
    "contribution": Seam("join", {}),
    "receipts": Seam("join", {}),
    "caller": Seam("join", {}),
    "guard": Seam("join", {}),
    "check": Seam("doctor", {}),
    "kernels": Seam("policy.cpu_kernels", {}),
    "admission": Seam("swarm", {}),
}


_HOME = "swarmnode.extensions"


@cache
def ours(kind: Kind) -> Mapping[str, str]:
    """Returns the import paths of the built-in parts by name, those of extensions/ last.

    >>> list(ours("engine"))
    ['embedded', 'generate', 'vllm']
    """
    found = dict(SEAMS[kind].ours)
    for parts in _extensions():
        found |= parts.get(kind, {})
    return found


def names(kind: Kind) -> tuple[str, ...]:
    """Returns the built-in names of this kind, followed by those that installed packages register.

    >>> names("transport")[0]
    'p2pd'
    """
    return (*ours(kind), *sorted(_registered(kind).keys() - ours(kind).keys()))


def known(kind: Kind, name: str, *besides: str) -> str:
    """Returns `name` if it may name a part; imports nothing. `besides`: other allowed words. Raises
    ValueError, like the validator of a setting."""
    if file := FILE_PATH.fullmatch(name):
        raise ValueError(
            f"use a module, not a file: write {file['module']}:{file['attribute']}, and"
            " put its folder on PYTHONPATH"
        )
    if name not in (*besides, *ours(kind)) and not IMPORT_PATH.fullmatch(name):
        found = names(kind)
        if name not in found:
            raise ValueError(_unknown(kind, (*besides, *found)))
    return name


def find(kind: Kind, name: str) -> Any:
    """Imports the part with this name.

    >>> find("rule", "sapo") is find("rule", "swarmnode.training.rules.rules:Sapo")
    True

    Raises ConfigError if there is none, or if it cannot be imported.
    """
    said = _said(kind, name)
    path = ours(kind).get(name) or (name if ":" in name else _registered(kind).get(name))
    if path is None:
        raise ConfigError(f"{said}: {_unknown(kind, names(kind))}")
    return _imported(said, path)


def find_called(kind: Kind, name: str, like: Callable[..., Any]) -> Any:
    """Imports a part that takes the arguments of the method `like`, without calling it. Raises ConfigError,
    also if the part does not take these arguments."""
    part, said = find(kind, name), _said(kind, name)
    asked = [*signature(like).parameters.values()][1:]
    in_order = [one.name for one in asked if one.kind is not Parameter.KEYWORD_ONLY]
    by_name = [one.name for one in asked if one.kind is Parameter.KEYWORD_ONLY]
    words = ", ".join([*in_order, *(f"{name}=" for name in by_name)])
    hint = (
        f"it must take the arguments of {like.__qualname__.partition('.')[0]} in {like.__module__}: ({words})"
    )
    if not callable(part):
        raise ConfigError(f"{said} is a {type(part).__name__}, which is not callable", hint=hint)
    try:
        takes = signature(part)
    except ValueError:  # Some callables written in C have no signature.
        return part
    try:
        takes.bind(*in_order, **dict.fromkeys(by_name))
    except TypeError as error:
        raise ConfigError(f"{said} has the wrong arguments: {error}", hint=hint) from error
    return part


def made(kind: Kind, name: str, make: Callable[[], Part], like: type) -> Part:
    """Returns the object that the part with this name makes, if it has all members of the protocol `like`;
    else raises ConfigError. Any other error of `make` gets a note naming the setting."""
    said = _said(kind, name)
    try:
        part = make()
    except SwarmnodeError:
        raise
    except Exception as error:
        error.add_note(f"raised by {said}")
        raise
    if lacks := lacking(part, like):
        raise ConfigError(
            f"{said} made a {type(part).__name__}, which lacks: {lacks}",
            hint=f"it must make an object with all members of {like.__name__} in {like.__module__}",
        )
    return part


def lacking(part: object, like: type) -> str:
    """Returns the members of the protocol `like` that `part` lacks, separated by commas; empty: none.

    >>> from swarmnode.node.showing.monitors import Monitor
    >>> lacking(object(), Monitor)
    'start, log, finish'
    """
    names = dict.fromkeys(
        name
        for one in reversed(like.__mro__)
        for name in vars(one)
        if not name.startswith("_") or name in ("__aenter__", "__aexit__")
    )
    # `async with` looks up the methods on the class.
    found = {name: hasattr(type(part) if name.startswith("_") else part, name) for name in names}
    return ", ".join(name for name in names if not found[name])


def importable(kind: Kind) -> Iterator[Any]:
    """Imports the parts of this kind one by one. Those that cannot be imported are skipped with a warning."""
    for name in names(kind):
        try:
            yield find(kind, name)
        except ConfigError as error:
            logger.warning("skipped: %s", error)


def first(kind: Kind) -> Any | None:
    """Imports the first part of this kind. None: there is none."""
    name = next(iter(names(kind)), None)
    if name is None:
        return None
    path = ours(kind).get(name) or _registered(kind)[name]
    return _imported(f"the {kind} {name!r}", path)


def _said(kind: Kind, name: str) -> str:
    return f"{SEAMS[kind].said_by} = {name!r}"


def _unknown(kind: Kind, names: tuple[str, ...]) -> str:
    return (
        f"no such {kind}; available: {', '.join(names) or 'none'}. Use your own as mymodule:name, or install"
        f" a package that registers the name as an entry point of swarmnode.{kind} (docs/extending.md)"
    )


def _imported(said: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        found = import_module(module)
    except SwarmnodeError:
        raise
    except ImportError as error:
        if module.startswith(f"{_HOME}."):
            folder = module.removeprefix(f"{_HOME}.").partition(".")[0]
            raise _broken(f"{said} of ", folder, error) from error
        raise ConfigError(
            f"{said} cannot be imported: {error}",
            hint=f"install {module!r}, or put its folder on PYTHONPATH",
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{said} cannot be imported: {error!r}", hint=where(error)) from error
    try:
        return attrgetter(attribute)(found)
    except AttributeError as error:
        public = ", ".join(each for each in vars(found) if not each.startswith("_"))[:100]
        raise ConfigError(
            f"{said} cannot be imported: {error}", hint=f"{module} has: {public or 'no names'}"
        ) from error


@cache
def _extensions() -> list[Parts]:
    """Returns the parts that each folder of extensions/ registers. Empty: there are no extensions."""
    try:
        home = import_module(_HOME)
    except ModuleNotFoundError:
        return []
    return [_parts_of(folder.name) for folder in iter_modules(home.__path__)]


def _parts_of(folder: str) -> Parts:
    try:
        return import_module(f"{_HOME}.{folder}").PARTS
    except (ImportError, AttributeError) as error:
        raise _broken("", folder, error) from error


def _broken(what: str, folder: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{what}{_HOME.replace('.', '/')}/{folder} cannot be imported: {error}",
        hint="reinstall swarmnode completely, with what this extension needs",
    )


def _registered(kind: Kind) -> dict[str, str]:
    """Returns the import paths that installed packages register, by name."""
    from importlib.metadata import entry_points  # Loading it takes as long as half of `--help`.

    found = entry_points(group=f"swarmnode.{kind}")
    return {one.name: f"{one.module}:{one.attr}" for one in found}

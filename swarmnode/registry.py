"""The parts that a setting or a command names, in one table; each is imported when it is asked for.

config, command line -> [find] -> engine, transport, learner, loss, rule, task kind, monitor, command ...

A part has a name of ours, of `SEAMS` or of the `PARTS` of a folder of extensions/; or `module:attribute`; or
a name that an installed package registers as an entry point of the group `swarmnode.<kind>`. A name of ours
is always ours. docs/extending.md has an example of each.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from pkgutil import iter_modules
from typing import Any, Literal

from swarmnode.errors import ConfigError

Kind = Literal[
    "engine", "transport", "learner", "loss", "rule", "task", "reward", "judge", "monitor", "command",
    "run", "page", "panel", "reach", "rollouts", "local_peers", "caller", "guard", "check", "kernels",
    "contribution", "receipts", "admission", "environment", "model", "convention", "names", "builtin",
]  # fmt: skip
Parts = Mapping[Kind, Mapping[str, str]]
"""Import paths by kind and name: the `PARTS` that each folder of extensions/ registers."""

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""`package.module:name`, as of a part of one's own."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A place where a part may be put, and the parts for it that the rest of swarmnode cannot do without."""

    said_by: str
    """The setting, flag or word that names the part."""
    ours: Mapping[str, str]
    """Import paths of these parts by name."""


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
    # Each is a function, or an app with commands of its own.
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


@cache
def ours(kind: Kind) -> Mapping[str, str]:
    """Returns the import paths of our own parts by name, those of extensions/ behind the others.

    >>> list(ours("engine"))
    ['embedded', 'generate', 'vllm']
    """
    found = dict(SEAMS[kind].ours)
    for parts in _extensions():
        found |= parts.get(kind, {})
    return found


def names(kind: Kind) -> tuple[str, ...]:
    """Returns our own names of this kind, and behind them those that installed packages register.

    >>> names("transport")[0]
    'p2pd'
    """
    return (*ours(kind), *sorted(_registered(kind).keys() - ours(kind).keys()))


def known(kind: Kind, name: str, *besides: str) -> str:
    """Returns `name` where it may be that of a part; imports nothing. `besides`: words that are none and may
    stand there too. Raises ValueError, as a setting's validator does."""
    if name not in (*besides, *ours(kind)) and not IMPORT_PATH.fullmatch(name):
        found = names(kind)
        if name not in found:
            raise ValueError(_unknown(kind, (*besides, *found)))
    return name


def find(kind: Kind, name: str) -> Any:
    """Imports the part of this name.

    >>> find("rule", "sapo") is find("rule", "swarmnode.training.rules.rules:Sapo")
    True

    Raises ConfigError where there is none, or it cannot be imported.
    """
    said = f"{SEAMS[kind].said_by} = {name!r}"
    path = ours(kind).get(name) or (name if ":" in name else _registered(kind).get(name))
    if path is None:
        raise ConfigError(f"{said}: {_unknown(kind, names(kind))}")
    return _imported(said, path)


def first(kind: Kind) -> Any | None:
    """Imports the first part of this kind. None: nothing here has one."""
    name = next(iter(names(kind)), None)
    return None if name is None else find(kind, name)


def _unknown(kind: Kind, names: tuple[str, ...]) -> str:
    return (
        f"no such {kind}: there are {', '.join(names) or 'none'}; or one of your own as mymodule:name, or"
        f" install a package that registers the name in the entry points swarmnode.{kind} (docs/extending.md)"
    )


def _imported(said: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        found = import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{said} cannot be imported: {error}",
            hint=f"install {module!r}, or put the folder it is in on PYTHONPATH",
        ) from error
    try:
        return attrgetter(attribute)(found)
    except AttributeError as error:
        public = ", ".join(each for each in vars(found) if not each.startswith("_"))[:100]
        raise ConfigError(
            f"{said} cannot be imported: {error}", hint=f"{module} has: {public or 'no names'}"
        ) from error


@cache
def _extensions() -> list[Parts]:
    """Returns what each folder of extensions/ registers. Empty: this installation has none."""
    try:
        home = import_module("swarmnode.extensions")
    except ModuleNotFoundError:
        return []
    return [import_module(f"{home.__name__}.{folder.name}").PARTS for folder in iter_modules(home.__path__)]


def _registered(kind: Kind) -> dict[str, str]:
    """The import paths that installed packages register, by name."""
    from importlib.metadata import entry_points  # As long to load as half of `--help`.

    found = entry_points(group=f"swarmnode.{kind}")
    return {one.name: f"{one.module}:{one.attr}" for one in found}

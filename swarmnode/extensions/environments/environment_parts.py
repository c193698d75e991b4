"""The environment of a task file or of a script, checked and taken apart.

tools, environment, settings of the file -> [parts_of] -> EnvironmentParts -> environment_task.py
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from swarmnode.errors import TaskError
from swarmnode.extensions.environments.episodes import called, is_stepwise
from swarmnode.extensions.environments.tools import Tool, tools_from
from swarmnode.tasks.task import MAX_INDEX

MOST_TURNS = 8
"""Turns that a policy has, if the environment sets no number."""

MAX_TURNS = 64
"""Most turns that an environment may grant."""

BLANK = "."
"""Placeholder question of examples without one: the text of `reset` takes its place."""


@dataclass(frozen=True, slots=True)
class EnvironmentParts:
    """The environment of a task file or of a script, in parts."""

    tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    """Functions that every example offers."""
    factories: Mapping[str, Callable[[], Any]] = field(default_factory=dict[str, Callable[[], Any]])
    """Factories of environments, by the value of the column `environment`; the key "" is the one for all
    examples."""
    action: Callable[[str], Any] | None = None
    """Function that makes an action of a turn's text. None: `step` takes the text."""
    exchangeable: bool = False
    most_turns: int = MOST_TURNS
    asks_by_reset: bool = False
    """True if there are no examples and the text of `reset` is the question."""


def parts_of(
    tools: Iterable[object] | None, environment: Any, said: Mapping[str, Any], *, asks_by_reset: bool = False
) -> EnvironmentParts:
    """Returns the parts, checked. `said`: further settings of the file (`exchangeable`, `most_turns`,
    `action`); those that it lacks are read from a single environment. Raises TaskError."""
    if environment is None:
        factories = dict[str, Any]()
    elif isinstance(environment, Mapping):
        factories = dict(cast(Mapping[str, Any], environment))
    else:
        factories = {"": environment}
    for factory in factories.values():
        if not callable(factory):
            raise TaskError(
                f"{factory!r:.80} does not make an environment",
                hint="name the class, or a function without arguments",
            )

    def stated(name: str, default: Any) -> Any:
        values = [getattr(factory, name, default) for factory in factories.values()]
        return said.get(name, values[0] if len(set(values)) == 1 else default)

    turns = stated("most_turns", MOST_TURNS)
    if not isinstance(turns, int) or not 1 <= turns <= MAX_TURNS:
        raise TaskError(f"most_turns is {turns!r:.40}", hint=f"write a number from 1 to {MAX_TURNS}")
    return EnvironmentParts(
        tools_from(tools) if tools is not None else {},
        factories,
        said.get("action"),
        bool(stated("exchangeable", False)),
        turns,
        asks_by_reset,
    )


def judge_themselves(parts: EnvironmentParts) -> bool:
    """Returns True if all of these environments give a reward themselves. Makes one instance of each. Raises
    TaskError."""
    hint = "it gets only columns, by name: environment = lambda: Env(...)."
    made = [called("making an instance", one, hint=hint) for one in parts.factories.values()]
    for one in made:
        if not hasattr(one, "reset"):
            raise TaskError(
                f"{type(one).__name__} is not an environment: it has no reset()",
                hint="write def reset(self, **columns); what it returns is appended to the prompt",
            )
    return bool(made) and all(is_stepwise(one) or hasattr(one, "get_reward") for one in made)


def blank_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yields examples for an environment that brings its own questions; the column `seed` is for its
    `reset`."""
    for index in range(MAX_INDEX):
        name = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
        yield {"prompt": BLANK, "seed": int.from_bytes(name, "little") >> 1}

"""One conversation with an environment: the user's code is called here, and what it raises becomes words.

environment_task.py -> [begin] -> Episode.hear(said) -> tools.py functions, reset/step/get_reward of the user
                -> live_episodes.py between two turns, and until it is scored

An environment is one of two kinds. That of TRL's `environment_factory`: `reset(**columns)` gives a text for
the end of the question, public methods with types and docstrings are tools, and `get_reward()` is optional.
That of OpenEnv (and Gymnasium): `reset(...)`, and `step(action)` gives an observation, a reward and whether
it is over. Any of these may be coroutine functions: they run on one event loop, which lives as long as the
process.
"""

import asyncio
import dataclasses
import inspect
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from numbers import Real
from typing import Any, Protocol, cast, get_type_hints

from swarmnode.chat import Message
from swarmnode.errors import TaskError, where
from swarmnode.extensions.environments.tool_calls import ToolCall, read_turn
from swarmnode.extensions.environments.tools import Tool, parameters_of, tools_from
from swarmnode.tasks.arguments import accepted
from swarmnode.tasks.source_file import of_theirs

logger = logging.getLogger(__name__)

MAX_OBSERVED_CHARS = 8192
"""Longest answer of an environment, in characters; the policy reads the beginning of a longer one."""

SPECIAL_METHODS = frozenset({"reset", "step", "state", "get_reward", "close", "render"})
"""Public methods of environments that are no tools."""


class Episode(Protocol):
    """A conversation with an environment that is not over yet."""

    opening: str
    """Text of the environment at the end of the question; often empty."""
    environment: Any
    """The user's object. None: the episode has only functions."""

    def hear(self, said: str) -> tuple[Message, ...] | None:
        """Returns the answer to the policy's next turn. None: the episode is over."""
        ...

    def reward(self) -> float | None:
        """Returns the environment's own reward of the episode, None if it gives none. Raises TaskError."""
        ...


@dataclass(slots=True)
class ToolEpisode:
    """Tools are called until a turn calls none."""

    tools: Mapping[str, Tool]
    environment: Any = None
    opening: str = ""

    def hear(self, said: str) -> tuple[Message, ...] | None:
        """Returns a message of role `tool` for each call."""
        calls = read_turn(said, {name: parameters_of(tool.schema) for name, tool in self.tools.items()}).calls
        return tuple({"role": "tool", "content": self._answer(call)} for call in calls) or None

    def reward(self) -> float | None:
        """Returns the result of the environment's `get_reward`, None if it has no such method."""
        if not hasattr(self.environment, "get_reward"):
            return None
        return as_number(called("get_reward()", self.environment.get_reward), "get_reward()")

    def _answer(self, call: ToolCall) -> str:
        if call.problem is not None:
            return f"error: {call.problem}"
        return heard(self.tools[call.name].function, **call.arguments)


@dataclass(slots=True)
class StepEpisode:
    """The policy acts, turn by turn, until a step says that it is over."""

    environment: Any
    action: Callable[[str], Any]
    opening: str = ""
    _return: float | None = None
    _over: bool = False

    def hear(self, said: str) -> tuple[Message, ...] | None:
        """Takes a step and returns its observation as a message of role `user`."""
        if self._over:
            return None
        try:
            action = self.action(said)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a type of the user's does not like what the policy said
            return _observed(f"error: {error}")
        try:
            result = waited(self.environment.step(action))
        except (Exception, SystemExit) as error:  # noqa: BLE001  what a step raises is for the policy to read
            _tell_of_a_step(type(self.environment).__name__, f"{error!r:.300}", where(error))
            return _observed(f"error: {error}")
        observation, reward, self._over = step_result(result)
        if reward is not None:
            self._return = (self._return or 0.0) + reward
        return None if self._over else _observed(observation_text(observation))

    def reward(self) -> float | None:
        """Returns the sum of the steps' rewards. None: no step gave one."""
        return self._return


def begin(environment: Any, columns: Mapping[str, Any], action: Callable[[str], Any] | None) -> Episode:
    """Begins a new episode with a fresh object. Raises TaskError if it cannot be reset, and closes it."""
    try:
        said = called("reset()", environment.reset, columns)
        if is_stepwise(environment):
            return StepEpisode(environment, action or action_of(environment), observation_text(_shown(said)))
        return ToolEpisode(_methods(environment), environment, "" if said is None else text_of(said))
    except BaseException:
        close(environment)
        raise


def is_stepwise(environment: Any) -> bool:
    """Returns True if an object (or class) is played by `step`. A `step` that returns a text is a tool like
    any other."""
    step = getattr(environment, "step", None)
    if step is None:
        return False
    try:
        return get_type_hints(step).get("return") is not str
    except (TypeError, NameError):
        return True


def _methods(environment: Any) -> dict[str, Tool]:
    """Returns the public methods of an environment, as tools."""
    names = [name for name, _ in inspect.getmembers(cast(object, type(environment)), inspect.isfunction)]
    special = SPECIAL_METHODS - ({"step"} if not is_stepwise(environment) else set())
    return tools_from(
        getattr(environment, name) for name in names if not name.startswith("_") and name not in special
    )


@lru_cache(maxsize=256)
def _tell_of_a_step(environment: str, error: str, place: str) -> None:
    """Tells once of what a step raised: where it does each time, nothing is ever rewarded."""
    logger.warning("step() of %s raised %s, which the policy reads: %s", environment, error, place)


# ---- the user's code ----


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of environments that are async: connections they open belong to it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def waited(result: Any) -> Any:
    """Returns a result, awaited first if it is awaitable."""
    if not inspect.isawaitable(result):
        return result

    async def coming() -> Any:
        try:
            return await result
        except SystemExit as error:  # It would end the loop of all the others.
            raise RuntimeError(f"it raised {error!r}") from error

    return asyncio.run_coroutine_threadsafe(coming(), _loop()).result()


def called(
    what: str, function: Callable[..., Any], columns: Mapping[str, Any] | None = None, hint: str = ""
) -> Any:
    """Calls the user's code with the columns that it takes. Raises TaskError."""
    return of_theirs(
        f"{what} of the environment failed",
        lambda: waited(function(**accepted(function, columns or {}))),
        hint,
    )


def heard(tool: Callable[..., Any], **arguments: Any) -> str:
    """Calls a tool and returns its result or its error as a text for the policy."""
    try:
        return text_of(waited(tool(**arguments)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  for the policy to read, as TRL has it
        return bounded(f"error: {error}" if str(error) else f"error: {type(error).__name__}")


def action_of(environment: Any) -> Callable[[str], Any]:
    """Returns the function that makes an action of a turn: `str`, or the class that `step` is annotated
    with."""
    try:
        hints = get_type_hints(environment.step)
        names = list(inspect.signature(environment.step).parameters)
    except (TypeError, ValueError, NameError):
        return str
    made = hints.get(names[0]) if names else None
    if not isinstance(made, type) or made in (str, object):
        return str
    return lambda said: _made(made, said)


def _made(kind: type[Any], said: str) -> Any:
    """Returns an action of a class with fields, read from JSON, or from plain text if it has a single field
    to fill."""
    text = said.rpartition("</think>")[2].strip()
    if kind in (int, float):
        return kind(text[:64])
    if text.startswith("{"):
        call = read_turn(text, {}).calls
        found = dict(call[0].arguments) if call and call[0].name else json.loads(text[:MAX_OBSERVED_CHARS])
        return kind(**found)
    needed = [
        one.name
        for one in inspect.signature(kind).parameters.values()
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    if len(needed) != 1:
        raise ValueError(f"an action is a JSON object with {', '.join(needed) or 'its fields'}")
    return kind(**{needed[0]: text})


# ---- what an environment says ----


def step_result(result: Any) -> tuple[Any, float | None, bool]:
    """Returns observation, reward and whether the episode is over, from the result of a step. Raises
    TaskError.

    >>> step_result(("hot", 0.5, False, {}))
    ('hot', 0.5, False)
    """
    match result:
        case (observation, reward, *ends, _) if len(ends) in (1, 2) and all(
            isinstance(_scalar(one), bool) for one in ends
        ):
            return observation, as_number(reward, "step()"), any(map(_scalar, ends))
        case _ if hasattr(result, "done"):
            reward = as_number(getattr(result, "reward", None), "step()")
            return _shown(result), reward, bool(result.done)
        case _:
            raise TaskError(
                f"step() of the environment returned {result!r:.80}",
                hint="return an object with observation, reward, done, or (observation, reward, done, info)",
            )


def _shown(result: Any) -> Any:
    """Returns the observation in a result of `reset` or `step`."""
    match result:
        case (observation, _):
            return observation
        case _:
            return getattr(result, "observation", result)


def as_number(value: Any, what: str) -> float | None:
    """Returns an environment's reward as a number. Raises TaskError for anything else."""
    if value is None:
        return None
    number = _scalar(value)
    if not isinstance(number, Real) or not math.isfinite(number):
        raise TaskError(
            f"{what} of the environment gave the reward {value!r:.40}", hint="return a finite number"
        )
    return float(number)


def _scalar(value: Any) -> Any:
    """Returns a number of numpy's or a tensor's as a Python number, and any other value as it is."""
    item = getattr(value, "item", None)
    try:
        return item() if callable(item) else value
    except (TypeError, ValueError, RuntimeError):
        return value  # An array of several.


HIDDEN = frozenset({"done", "reward", "metadata"})
"""Fields of OpenEnv's observations that are not for the policy."""


def text_of(value: Any) -> str:
    """Returns the result of a tool, or of `reset` beside tools, as text for the policy.

    >>> text_of({"board": "..x", "done": False}), text_of(7), text_of(None)
    ('{"board": "..x", "done": false}', '7', '')
    """
    value = _plain(value)
    if isinstance(value, Mapping):
        fields = {str(name): one for name, one in cast(Mapping[Any, Any], value).items()}
        value = json.dumps(fields, ensure_ascii=False, default=str)
    return "" if value is None else bounded(str(value))


def observation_text(value: Any) -> str:
    """Returns the observation of `step` or `reset` as text for the policy, without the HIDDEN fields.

    >>> observation_text({"board": "..x", "done": False}), observation_text({"x": 1, "reward": 2.0})
    ('..x', '{"x": 1}')
    """
    value = _plain(value)
    if not isinstance(value, Mapping):
        return text_of(value)
    fields = {str(name): one for name, one in cast(Mapping[Any, Any], value).items()}
    shown = {name: one for name, one in fields.items() if name not in HIDDEN and one is not None}
    if len(shown) == 1 and isinstance(next(iter(shown.values())), str):
        return bounded(next(iter(shown.values())))
    return text_of(shown)


def _plain(value: Any) -> Any:
    """Returns the fields of a record as a dictionary, and any other value as it is."""
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def bounded(text: str) -> str:
    """Returns a text that can be encoded, cut to the length that a policy is shown."""
    if len(text) > MAX_OBSERVED_CHARS:
        text = f"{text[:MAX_OBSERVED_CHARS]} ... ({len(text)} characters)"
    return text.encode(errors="replace").decode()


def _observed(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": bounded(text)},)


def close(environment: Any) -> None:
    """Closes an environment with its connections and processes, if it can be closed."""
    ending = getattr(environment, "close", None)
    if ending is not None:
        heard(ending)


def own_tools(opened: Episode) -> Iterable[Tool]:
    """Returns the tools of an episode; one that is played by `step` has none."""
    return opened.tools.values() if isinstance(opened, ToolEpisode) else ()

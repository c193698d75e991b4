"""Reward functions: found by name, called on TRL's contract unchanged, and always checked.

example + completions -> [call_reward] -> one finite number or None per completion
                text -> [pieces_of] -> numbers for a reward that insists on completion_ids

TRL passes prompts, completions, completion_ids and every dataset column by keyword, to a sync or an async
function, and does not check what comes back (trl#6533). We pass a function only what its signature accepts,
and raise TaskError when a result has the wrong length or type or is not finite.

Completions are texts if the prompt is a text, and lists of one message if it was given as messages, as in
TRL. A function that annotates them as lists of messages, as all of trl.rewards do, always gets messages. This
follows from its signature alone, so it is the same on every node.

Token ids are not passed: each node has its own, scores texts of strangers without ever having their ids, and
all nodes must find the same reward. A function that requires them gets a number for each piece of the text
instead, the same on every node, for any model. Pieces are words of up to eight letters, up to three digits,
and single signs: about as many as the tokens of a common vocabulary, and a repeated phrase repeats here too.
They cannot be decoded.
"""

import asyncio
import inspect
import json
import logging
import math
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat, cast

from pydantic import ValidationError

from swarmnode.chat import Message, Prompt, messages_of
from swarmnode.errors import TaskError, where
from swarmnode.registry import find, names
from swarmnode.settings.config import JudgeConfig
from swarmnode.tasks.arguments import accepted, parameters_of
from swarmnode.tasks.judging.conventions import adapted, split_convention
from swarmnode.tasks.judging.plain_rewards import builtin
from swarmnode.tasks.kinds.imported import import_module
from swarmnode.tasks.source_file import load_source, of_theirs, traceback_of
from swarmnode.tasks.task import MAX_ABS_REWARD, is_held_out
from swarmnode.types import WEIGHT_MARK, Example

logger = logging.getLogger(__name__)

# Bytes, because what counts as a letter beyond ASCII changes with the version of Python.
_PIECE = re.compile(rb" ?[A-Za-z]{1,8}| ?[0-9]{1,3}|[\x80-\xff]{1,4}|\s+|.", re.DOTALL)


def pieces_of(text: str) -> list[int]:
    """Returns a token number for each piece of a text; equal pieces have equal numbers.

    >>> len(pieces_of("What is 12 + 34?")), pieces_of("no no")[0] == pieces_of("no")[0]
    (7, True)
    """
    return [zlib.crc32(piece) for piece in _PIECE.findall(text.encode(errors="replace"))]


Reward = Callable[..., Any]
"""`fn(prompts, completions, completion_ids=None, **columns) -> list[float | None]`, or a coroutine of it.

It may have attributes: `of_group`, True if it compares the answers to one example; `exchangeable`, False if
other nodes would get other scores from it; `identity`, a text that distinguishes it from every other reward
if its source does not."""


def are_exchangeable(rewards: Mapping[str, Reward]) -> bool:
    """Returns True if other nodes would get the same scores from all these rewards, even for a part of a
    group."""
    return not judge_groups(rewards) and all(
        getattr(reward, "exchangeable", True) for reward in rewards.values()
    )


MAX_WEIGHT = 1000.0

MOST_METRICS = 32
"""Most names that the rewards of a task may pass to `log_metric`; further ones are left out."""

MOST_METRIC_CHARS = 64

_MODULES = ("exact", "format", "length", "math", "strict")

URLS = ("http://", "https://")
"""Prefixes of a reward that is the URL of a judge."""

_RESERVED = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)
"""Arguments of the contract, which no column may be named after."""

_LISTS_OF_MESSAGES = re.compile(r"(\w+\.)*(list|sequence)\[\s*(\w+\.)*(list|sequence)\[", re.IGNORECASE)
"""An annotation saying that each completion is a list of messages."""


def judge_groups(rewards: Mapping[str, "Reward"]) -> bool:
    """Returns True if one of these rewards compares the answers to one example and so has to see the whole
    group at once. A function says so by `of_group = True`."""
    return any(getattr(reward, "of_group", False) for reward in rewards.values())


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state of TRL's trainer that a reward may ask for. It is always that of the beginning: the same text
    must score the same on every node, so a reward cannot depend on a node's progress."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


def load_reward(spec: str) -> Reward:
    """Finds a reward: `exact_match` (ours), `rewards.format:think_format` (ours), `path/file.py:function`,
    `installed.module:function` or the URL of a judge. A reward for another trainer is adapted, recognized by
    its arguments or by a prefix as in `verl:path/file.py:function` (conventions.py).

    >>> load_reward("exact_match")(["2+2="], ["4"], answer=["4"])
    [1.0]
    """
    if spec.startswith(URLS):
        return judge_of(json.dumps({"url": spec}))
    origin, _, name = spec.rpartition(":")
    if not origin:
        found = (rewards[name] for rewards in map(_rewards_in, _MODULES) if name in rewards)
        if (plain := next(found, None)) is not None:
            return plain
        if name not in names("reward"):
            raise _unknown(spec)
        return find("reward", name)
    convention, path = split_convention(spec)
    origin, _, name = path.rpartition(":")
    module = _module(origin)
    reward = _attribute(module, name)
    if not callable(reward) and (
        reward is None or convention is None or not find("convention", convention).of_objects
    ):
        raise _unknown(spec, _offered(module))
    return adapted(reward, convention)


def named_rewards(rewards: Sequence[Reward | str]) -> dict[str, Reward]:
    """Returns rewards by their names in scores and metrics. The policy learns from their weighted sum. Raises
    TaskError."""
    found: dict[str, Reward] = {}
    for number, given in enumerate(rewards):
        if not isinstance(given, str) and not callable(given):
            raise TaskError(f"not a reward: {given!r:.80}", hint="pass a function, or the name of one")
        reward: Reward = load_reward(given) if isinstance(given, str) else adapted(given)
        name = given.rpartition(":")[2] if isinstance(given, str) else _name(given)
        nameless = name == "<lambda>" or (isinstance(given, str) and given.startswith(URLS))
        name = f"reward_{number}" if nameless else name
        if name in found:
            raise TaskError(f"two rewards are named {name}", hint="give each function its own name")
        found[name] = reward
    return found


def with_weights(rewards: Mapping[str, Reward], weights: object) -> dict[str, Reward]:
    """Returns the rewards under names that end in their weights, in the given order; without weights,
    unchanged. Raises TaskError unless there is one number for each.

    >>> list(with_weights({"correct": len, "format": len}, [1, 0.5]))
    ['correct', 'format*0.5']
    """
    try:
        numbers = [float(weight) for weight in cast(Iterable[Any], weights)]
    except (TypeError, ValueError):
        raise TaskError(f"invalid reward weights {weights!r:.80}", hint="pass a list of numbers") from None
    if not numbers:
        return dict(rewards)
    if len(numbers) != len(rewards):
        raise TaskError(
            f"got {len(numbers)} reward weights for {len(rewards)} rewards",
            hint=f"pass one weight for each of {', '.join(rewards) or 'the rewards that you pass'}",
        )
    for weight in numbers:
        if not abs(weight) <= MAX_WEIGHT:
            raise TaskError(f"invalid reward weight {weight:g}", hint=f"the largest is {MAX_WEIGHT:g}")
    return {
        name if weight == 1 else f"{name}{WEIGHT_MARK}{weight!r}": reward
        for (name, reward), weight in zip(rewards.items(), numbers, strict=True)
    }


def judge_of(settings: str) -> Reward:
    """Returns the judge at a URL, with these settings in JSON. Raises TaskError, which quotes no value since
    one may hold a password, and ConfigError if no installed extension asks judges."""
    try:
        config = JudgeConfig.model_validate_json(settings)
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(("tasks.judge", *map(str, first["loc"])))
        why = first["msg"].removeprefix("Value error, ")
        raise TaskError(f"{setting}: {why}", hint="`swarmnode config show --explain` explains it") from None
    return find("judge", "http")(config)


def _unknown(spec: str, there: Sequence[str] | None = None) -> TaskError:
    """Returns the error for a missing reward, with the name that was probably meant. `there`: names in the
    module that was searched; None: it would be one of ours."""
    known = builtin_rewards() if there is None else there
    close = get_close_matches(spec.rpartition(":")[2], known, n=1)
    found = ", ".join(known)[:300] or "none"
    hint = (
        f"did you mean {close[0]}?"
        if close
        else f"{'built-in rewards' if there is None else 'it has'}: {found}"
    )
    return TaskError(f"no reward {spec!r}", hint=hint)


def _offered(module: ModuleType) -> list[str]:
    """Returns the names of a module without a leading underscore."""
    return [name for name in dir(module) if not name.startswith("_")]


def builtin_rewards() -> list[str]:
    """Returns the names of the reward functions that come with swarmnode."""
    return [*(name for module in _MODULES for name in _rewards_in(module)), *names("reward")]


def _attribute(module: ModuleType, name: str) -> Any:
    """Returns an attribute of a module, or None. Lazy modules, such as trl.rewards, import it here. Raises
    TaskError."""
    return of_theirs(f"cannot import {name} of {module.__name__}", lambda: getattr(module, name, None))


@cache
def _rewards_in(name: str) -> dict[str, Reward]:
    """Returns the rewards of one of our modules, which is imported only if those before it lack the name."""
    module = builtin(name)
    return {
        name: value for name, value in vars(module).items() if inspect.isfunction(value) and _is_reward(value)
    }


def _is_reward(function: Callable[..., Any]) -> bool:
    return list(inspect.signature(function).parameters)[:2] == ["prompts", "completions"]


def _module(origin: str) -> ModuleType:
    if origin.endswith(".py"):
        return load_source(Path(origin)).module
    package, _, module = origin.partition(".")
    if package == "rewards" and module in _MODULES:
        return builtin(module)
    return import_module(origin)


def call_reward(
    reward: Reward,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    conversational: bool = False,
    instead: Mapping[str, Any] | None = None,
    metrics: dict[str, float] | None = None,
) -> list[float | None]:
    """Calls any TRL reward with the arguments that it accepts, and checks its answer. None stays None.

    `conversational`: the task gave its prompts as messages. `instead`: replacements of our arguments, for
    completions that are conversations. `metrics`: receives what the reward passes to `log_metric`. Blocks
    until an async reward is done, so call it off the event loop. Raises TaskError.

    >>> call_reward(lambda completions, **columns: [len(c) for c in completions], ["?"], ["four"])
    [4.0]
    """
    columns = columns or {}
    if clash := _RESERVED & columns.keys():
        raise TaskError(
            f"column {min(clash)!r} has the name of a reward's argument", hint="rename the column"
        )
    as_messages = conversational or _wants_messages(reward)
    arguments: dict[str, Any] = {
        "prompts": [messages_of(prompt) for prompt in prompts] if as_messages else list(prompts),
        "completions": [_said(text) for text in completions] if as_messages else list(completions),
        "trainer_state": TrainerState(),
        "log_extra": _log_extra,
        "log_metric": partial(_log_metric, {} if metrics is None else metrics),
        **{name: list(values) for name, values in columns.items()},
        **(instead or {}),
    }
    given = _taken(reward, arguments)
    if _insists_on_ids(reward):
        given["completion_ids"] = [pieces_of(text) for text in completions]
    try:
        result = reward(**given)
        if inspect.isawaitable(result):
            result = _wait(result)
        values = _listed(result, len(completions))
    except (TaskError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        failed = TaskError(f"reward {_name(reward)} failed: {error!r}", hint=where(error))
        failed.add_note(traceback_of(error))
        raise failed from error
    return _checked(reward, result, values, len(completions))


def score_with(
    rewards: Mapping[str, Reward],
    example: Example,
    completions: Sequence[str],
    *,
    held_out: bool | None = None,
    instead: Mapping[str, Any] | None = None,
) -> list[Mapping[str, float | None]]:
    """Scores the completions of one example with several named rewards, in the form of `Task.score`.
    `held_out`: True if no node trains on the example; None: its prompt decides. `instead`: see
    `call_reward`."""
    rewards = rewards_for(rewards, example, held_out=held_out)
    conversational = example.conversational or instead is not None
    count = len(completions)
    prompts = [example.prompt] * count
    columns = {name: [value] * count for name, value in example.columns.items()}
    metrics: dict[str, float] = {}
    values = [
        call_reward(
            reward, prompts, completions, columns,
            conversational=conversational, instead=instead, metrics=metrics,
        )
        for reward in rewards.values()
    ]  # fmt: skip
    taken = {name.partition(WEIGHT_MARK)[0] for name in rewards}
    measured = {f"{name}{WEIGHT_MARK}0.0": value for name, value in metrics.items() if name not in taken}
    rows = zip(*values, strict=True) if values else [()] * count
    # Next to nothing but None, a number would count as a reward of 0.
    return [dict(zip(rewards, row, strict=True)) | ({} if set(row) <= {None} else measured) for row in rows]


def rewards_for(
    rewards: Mapping[str, Reward], example: Example, *, held_out: bool | None = None
) -> Mapping[str, Reward]:
    """Returns the rewards of an example. On held-out examples, rewards with a method `measured` are replaced,
    since their training signal does not measure success. `held_out`: see `score_with`."""
    if not (is_held_out(example.prompt) if held_out is None else held_out):
        return rewards
    return dict(
        cast(Any, reward).measured(example.columns) if hasattr(reward, "measured") else (name, reward)
        for name, reward in rewards.items()
    )


def _said(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _wants_messages(reward: Reward) -> bool:
    completions = _parameters(reward).get("completions")
    return completions is not None and bool(_LISTS_OF_MESSAGES.match(str(completions.annotation)))


def _insists_on_ids(reward: Reward) -> bool:
    ids = _parameters(reward).get("completion_ids")
    return ids is not None and ids.default is ids.empty


def _parameters(reward: Reward) -> Mapping[str, inspect.Parameter]:
    try:
        return parameters_of(reward)
    except (TypeError, ValueError) as error:
        raise TaskError(f"reward {reward!r:.80} cannot be called: {error}") from error


def _taken(reward: Reward, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the function takes. Raises TaskError if it needs one that is missing."""
    parameters = _parameters(reward).values()
    keywords = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for parameter in keywords:
        if parameter.default is parameter.empty and parameter.name not in {*arguments, "completion_ids"}:
            columns = ", ".join(sorted(arguments.keys() - _RESERVED)) or "none"
            raise TaskError(
                f"reward {_name(reward)} needs {parameter.name!r}, which the example does not have",
                hint=f"its columns are: {columns}",
            )
    return accepted(reward, arguments)


def _wait(awaitable: Awaitable[Any]) -> Any:
    """Runs an async reward to its end, in a thread and loop of its own: the caller may already run a loop,
    and a reward that blocks delays no other."""

    async def result() -> Any:
        return await awaitable

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: asyncio.run(result())).result()


def _listed(result: Any, count: int) -> list[Any] | None:
    """Returns a reward's result as a list of at most `count` + 1 items, or None if it is not an iterable of
    numbers. TRL only iterates over the result, so an array or a generator is as good as a list."""
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        return None
    return list(islice(cast(Iterable[Any], result), count + 1))


def _checked(reward: Reward, result: Any, values: list[Any] | None, count: int) -> list[float | None]:
    if values is None:
        raise _odd(reward, f"returned {type(result).__name__}, not a list")
    if len(values) != count:
        raise _odd(reward, f"returned {len(values)} values for {count} completions")
    return [None if value is None else _finite(reward, value) for value in values]


def _odd(reward: Reward, what: str) -> TaskError:
    return TaskError(
        f"reward {_name(reward)} {what}", hint="return a list with one number, or None, for each completion"
    )


def _finite(reward: Reward, value: Any) -> float:
    # True and False are numbers, and those of numpy and torch convert to float: all may answer "is it right?"
    if not isinstance(value, SupportsFloat):
        raise _odd(reward, f"returned a {type(value).__name__}, not a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise _odd(reward, f"returned a {type(value).__name__}, not a number or None") from None
    if not math.isfinite(number):
        raise TaskError(
            f"reward {_name(reward)} returned {number}", hint="return None where it does not apply"
        )
    return number


def _name(reward: Reward) -> str:
    return reward.__name__ if inspect.isroutine(reward) else type(reward).__name__


def _log_metric(kept: dict[str, float], name: object, value: object) -> None:
    """Stores a number that a reward measured. Anything else, or one too large for a reward, is left out: in
    TRL nothing depends on it either."""
    short = str(name).replace(WEIGHT_MARK, " ")[:MOST_METRIC_CHARS]
    if isinstance(value, SupportsFloat) and (short in kept or len(kept) < MOST_METRICS):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            if abs(number := float(value)) <= MAX_ABS_REWARD:
                kept[short] = number


def _log_extra(name: object, values: object) -> None:
    _say_that_it_is_not_kept(str(name)[:MOST_METRIC_CHARS])


@cache
def _say_that_it_is_not_kept(name: str) -> None:
    logger.warning(
        "a reward calls log_extra(%r), which is not stored; pass numbers to log_metric, or return them"
        " from a second reward of weight 0 (tasks.reward_weights)",
        name,
    )

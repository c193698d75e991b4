"""What tells one judge from another: digests of functions, of which the versions of tasks are made.

data.py (--set tasks.reward=file.py:f), functions.py (Node(..., reward=f)) -> [judged_version] -> Task.version

A function is told by its own source and by what it uses of its module: other functions, classes, numbers,
texts. Not by its file, so that a script and a command line that name one reward mean one version, however the
script runs the node; and not by what it imports.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, cast

from swarmnode.tasks.rewards import RemoteReward

Function = Callable[..., Any]


def judged_version(version: str, rewards: Mapping[str, Function]) -> str:
    """The version of a task's examples with these judges: the same wherever the judges were named, and in any
    order."""
    return digest_of_texts([version, *sorted(map(source_of, rewards.values()))])


def digest_of_texts(texts: Iterable[str]) -> str:
    """One digest of several texts."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def source_of(function: Function) -> str:
    """What a function does, as text: its source, that of what it uses of its module, and what it closes over.
    Where there is no source, its byte code, which differs between versions of Python.

    >>> source_of(source_of) == source_of(digest_of_texts)
    False
    """
    if isinstance(function, RemoteReward):
        return function.version
    found: dict[int, str] = {}
    waiting: list[Any] = [_inner(function)]
    while waiting:
        value = waiting.pop(0)
        if id(value) in found:
            continue
        if _is_code(value):
            found[id(value)] = _own_source(value)
            waiting += _used(value)
        elif (text := _plain(value)) is not None:
            found[id(value)] = text
    return "\n".join(found.values())


def _inner(function: Function) -> Any:
    """What was written: the function that others are wrapped around, or the class of an object."""
    inner: Any = inspect.unwrap(function)
    if inspect.isclass(inner) or inspect.isroutine(inner):
        return inner
    return cast(Any, type(inner))


def _is_code(value: object) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


def _own_source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        code = getattr(value, "__code__", None)
        if code is None:
            return f"{value.__module__}.{value.__qualname__}"
        return f"{code.co_code.hex()} {code.co_consts!r} {code.co_names!r}"


def _used(value: Any) -> Iterator[Any]:
    """What a function or the methods of a class use of their module, and what they close over."""
    functions = filter(inspect.isfunction, vars(value).values()) if inspect.isclass(value) else [value]
    for function in map(inspect.unwrap, functions):
        if not inspect.isfunction(function):
            continue
        for name in _names(function.__code__):
            used = function.__globals__.get(name)
            if not _is_code(used) or used.__module__ == function.__module__:
                yield used
        for cell in function.__closure__ or ():
            yield cell.cell_contents


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _plain(value: object) -> str | None:
    """A number, a text, a pattern, or lists and dictionaries of such, as text. None: it is something else."""
    if value is None:
        return None
    if isinstance(value, re.Pattern):
        return repr(cast(re.Pattern[Any], value).pattern)
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return None

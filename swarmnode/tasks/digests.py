"""What tells one judge from another: digests of functions, of which the versions of tasks are made.

data.py (--set tasks.reward=file.py:f), functions.py (Node(..., reward=f)) -> [judged_version] -> Task.version

A function is told by its own source and by what it uses of its module: other functions, classes, numbers,
texts; and by what it uses of the modules that lie beside its own. Not by its file, so that a script and a
command line that name one reward mean one version, however the script runs the node; and not by what is
installed. An object that is called, a bound method and a partial are told by what they carry, too.

A task file is told by its whole text, and so are the modules beside it that it imports at its top.
"""

import hashlib
import inspect
import json
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

from swarmnode.tasks.rewards import RemoteReward
from swarmnode.types import weight_of

Function = Callable[..., Any]


def judged_version(version: str, rewards: Mapping[str, Function]) -> str:
    """The version of a task's examples with these judges: the same wherever the judges were named, and in any
    order. Another weight is another judge."""
    texts = [(source_of(reward), weight_of(name)) for name, reward in rewards.items()]
    return digest_of_texts(
        [version, *sorted(text if weight == 1 else f"{weight!r} {text}" for text, weight in texts)]
    )


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
    waiting: list[Any] = list(_carried(function))
    while waiting:
        value = waiting.pop(0)
        if id(value) in found:
            continue
        if _is_bound(value):
            found[id(value)] = type(value).__name__
            waiting += _carried(value)
        elif isinstance(value, ModuleType):
            found[id(value)] = _own_source(value)
        elif _is_code(value):
            found[id(value)] = _own_source(value)
            waiting += _used(value)
        elif (text := _plain(value)) is not None:
            found[-1 - len(found)] = text  # Equal values are one object, and each counts where it stands.
    return "\n".join(found.values())


def sources_beside(module: ModuleType) -> list[str]:
    """The texts of the modules that lie beside this one and that it uses, and of those that they use in turn,
    in the order of their names."""
    found: dict[str, ModuleType] = {}
    waiting = [module]
    while waiting:
        home = waiting.pop()
        for value in list(vars(home).values()):
            used = _module_of(value)
            if used is not None and used.__name__ not in found and _lies_beside(used, module):
                found[used.__name__] = used
                waiting.append(used)
    return [_own_source(found[name]) for name in sorted(found)]


def _module_of(value: object) -> ModuleType | None:
    if isinstance(value, ModuleType):
        return value
    return sys.modules.get(value.__module__) if _is_code(value) else None


_NEVER_BESIDE = frozenset({"swarmnode", "rewards", *sys.stdlib_module_names})
"""Ours, even where somebody works in a clone, and Python's: every node has them, wherever they lie."""


def _lies_beside(used: ModuleType, home: ModuleType) -> bool:
    """Whether a module is a file in the folder of another, or further down, that nobody installed."""
    theirs, ours = getattr(used, "__file__", None), getattr(home, "__file__", None)
    if theirs is None or ours is None or used is home or used.__name__.partition(".")[0] in _NEVER_BESIDE:
        return False
    try:
        parts = Path(theirs).resolve().relative_to(Path(ours).resolve().parent).parts
    except ValueError:
        return False
    return not {"site-packages", "dist-packages"}.intersection(parts)


def _carried(function: Function) -> Iterator[Any]:
    """What was written, inside of what others are wrapped around, and what it carries: the arguments of a
    partial, the attributes of an object that is called or whose method is."""
    inner: Any = inspect.unwrap(function)
    if isinstance(inner, partial):
        bound = cast(partial[Any], inner)
        yield from _carried(bound.func)
        yield from (*bound.args, *(part for pair in sorted(bound.keywords.items()) for part in pair))
    elif inspect.ismethod(inner):
        yield inner.__func__
        if not inspect.isclass(inner.__self__):
            yield from _attributes(inner.__self__)
    elif inspect.isclass(inner) or inspect.isroutine(inner):
        yield inner
    else:
        yield type(inner)
        yield from _attributes(inner)


def _attributes(value: object) -> Iterator[Any]:
    """Names and values of what a person's object holds; ours say by themselves what tells them apart."""
    if not type(value).__module__.startswith("swarmnode."):
        yield from (part for pair in sorted(getattr(value, "__dict__", {}).items()) for part in pair)


def _is_bound(value: object) -> bool:
    return isinstance(value, partial) or inspect.ismethod(value)


def _is_code(value: object) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


def _own_source(value: Any) -> str:
    try:
        linecache.checkcache(inspect.getfile(value))
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
            home = sys.modules.get(function.__module__)
            origin = _module_of(used)
            if origin is None or origin is home or (home is not None and _lies_beside(origin, home)):
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

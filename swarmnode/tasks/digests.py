"""Digests of functions: they tell judges apart, and versions of tasks are made from them."""

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

from swarmnode.types import weight_of

Function = Callable[..., Any]


def judged_version(version: str, rewards: Mapping[str, Function]) -> str:
    """Returns the version of a task's examples with these judges. It does not depend on where the judges were
    named, nor on their order; another weight gives another version. A judge that states its `identity`
    (judging/rewards.py) is believed."""
    texts = [(_identity_of(reward), weight_of(name)) for name, reward in rewards.items()]
    return digest_of_texts(
        [version, *sorted(text if weight == 1 else f"{weight!r} {text}" for text, weight in texts)]
    )


def digest_of_texts(texts: Iterable[str]) -> str:
    """Returns one digest of several texts."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _identity_of(reward: Function) -> str:
    stated = getattr(reward, "identity", None)
    return stated if isinstance(stated, str) else source_of(reward)


def source_of(function: Function) -> str:
    """Returns a text that identifies a function's behaviour: its source, the source of the names that it uses
    from its module, and the values that it closes over. Without a source its byte code is used, which differs
    between versions of Python.

    >>> source_of(source_of) == source_of(digest_of_texts)
    False
    """
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
            found[-1 - len(found)] = text  # Equal values are one object, and each counts at its place.
    return "\n".join(found.values())


def sources_beside(module: ModuleType) -> list[str]:
    """Returns the texts of the modules beside this one that it uses, directly or through each other, in the
    order of their names."""
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
"""Packages that never count as files beside a task, because every node has them: ours, even in a clone, and
Python's."""


def _lies_beside(used: ModuleType, home: ModuleType) -> bool:
    """Returns True if `used` is a file in the folder of `home` or below it, and not an installed package."""
    theirs, ours = getattr(used, "__file__", None), getattr(home, "__file__", None)
    if theirs is None or ours is None or used is home or used.__name__.partition(".")[0] in _NEVER_BESIDE:
        return False
    try:
        parts = Path(theirs).resolve().relative_to(Path(ours).resolve().parent).parts
    except ValueError:
        return False
    return not {"site-packages", "dist-packages"}.intersection(parts)


def _carried(function: Function) -> Iterator[Any]:
    """Yields the function inside all wrappers and the values that it carries: the arguments of a partial, and
    the attributes of a callable object or of a method's object."""
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
    """Yields names and values of a user's object. Our own objects state their identity themselves."""
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


_OF_EVERY_MODULE = frozenset({*vars(ModuleType("")), "__file__", "__cached__", "__path__"})
"""Names that every module has, such as its location, which differs between machines. A function's names do
not distinguish `__file__` from `other_module.__file__`."""


def _used(value: Any) -> Iterator[Any]:
    """Yields the objects of its module that a function, or the methods of a class, use, and the values that
    they close over."""
    functions = filter(inspect.isfunction, vars(value).values()) if inspect.isclass(value) else [value]
    for function in map(inspect.unwrap, functions):
        if not inspect.isfunction(function):
            continue
        for name in _names(function.__code__):
            if name in _OF_EVERY_MODULE:
                continue
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
    """Returns a number, a text, a pattern, or lists and dictionaries of them as text. None: the value is
    something else."""
    if value is None:
        return None
    if isinstance(value, re.Pattern):
        return repr(cast(re.Pattern[Any], value).pattern)
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return None

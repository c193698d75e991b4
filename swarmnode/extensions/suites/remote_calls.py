"""Tests that call their function in another process: both ends of the conversation."""

import builtins
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any

CHANNEL = 3
"""Descriptor of the socket between the two (confinement/launch.py)."""

MAX_MESSAGE_BYTES = 1 << 20
MAX_ITEMS = 100_000
"""Most items read of an iterator that a function returns, which is compared as a list."""

Wire = Any
"""A value in JSON. Everything but None, bool and str is a list that begins with the letter of its type."""


class CandidateGone(BaseException):
    """Raised when the candidate's process has ended or sent no valid answer. No test could have expected
    that."""


class RemoteObject:
    """An object of the candidate's that is no plain value: it can be called and asked for attributes.

    It is neither true nor equal to anything: that would be the candidate's own word.
    """

    def __init__(self, candidate: "AnswerProcess", target: str | int) -> None:
        self._candidate = candidate
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._candidate.call(self._target, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._candidate.ask(["get", self._target, name])

    def __bool__(self) -> bool:
        raise TypeError("an object of the candidate's is not a truth value")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise TypeError("an object of the candidate's cannot be compared")

    __hash__ = object.__hash__


class Values:
    """Converts values to the wire and back. The candidate keeps objects that are no plain values, and sends
    their numbers."""

    def __init__(self, candidate: "AnswerProcess | None" = None) -> None:
        self._candidate = candidate
        self.kept: list[Any] = []

    def written(self, value: Any) -> Wire:
        """Returns a value in the form of `Wire`.

        >>> Values().written((1, "a"))
        ['t', [['i', '0x1'], 'a']]
        """
        match value:
            case None | bool() | str():
                return value
            case int():
                return ["i", hex(value)]
            case float():
                return ["f", float(value).hex()]
            case complex():
                return ["c", value.real.hex(), value.imag.hex()]
            case bytes():
                return ["b", value.hex()]
            case _:
                return self._collection(value)

    def read(self, wire: Wire) -> Any:
        """Returns the value that `written` encoded. Raises any exception if the message is nonsense."""
        if wire is None or isinstance(wire, bool | str):
            return wire
        match wire:
            case ["i", str(text)]:
                return int(text, 16)
            case ["f", str(text)]:
                return float.fromhex(text)
            case ["c", str(real), str(imaginary)]:
                return complex(float.fromhex(real), float.fromhex(imaginary))
            case ["b", str(text)]:
                return bytes.fromhex(text)
            case ["d", list()]:
                return {self.read(key): self.read(value) for key, value in wire[1]}
            case [("l" | "t" | "s" | "z") as letter, list()]:
                return _KINDS[letter](self.read(item) for item in wire[1])
            case ["o", int(number)]:
                return self.kept[number] if self._candidate is None else RemoteObject(self._candidate, number)
            case _:
                raise CandidateGone("no value")

    def _collection(self, value: Any) -> Wire:
        if _is_a(value, dict):
            return ["d", [[self.written(key), self.written(one)] for key, one in value.items()]]
        if _is_a(value, *_KINDS.values()):
            return [_letter(value), [self.written(item) for item in value]]
        return self._other(value)

    def _other(self, value: Any) -> Wire:
        if isinstance(value, RemoteObject):
            return ["o", vars(value)["_target"]]
        if self._candidate is not None:
            raise TypeError(f"a {type(value).__name__} cannot be handed to a candidate")
        if _is_a(value, Iterator):
            return self.written([*islice(value, MAX_ITEMS)])
        self.kept.append(value)
        return ["o", len(self.kept) - 1]


def _is_a(value: Any, *kinds: type) -> bool:
    """`isinstance` without narrowing the type of the contents."""
    return isinstance(value, kinds)


_KINDS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}


def _letter(value: Any) -> str:
    return next(letter for letter, kind in _KINDS.items() if isinstance(value, kind))


class Channel:
    """Messages of bounded length over the socket."""

    def __init__(self) -> None:
        self._file = os.fdopen(CHANNEL, "rb")

    def send(self, message: Wire) -> None:
        """Sends a message. Raises OSError if the other end is closed."""
        body = json.dumps(message).encode()
        left = memoryview(len(body).to_bytes(4, "big") + body)
        while left:
            left = left[os.write(CHANNEL, left) :]

    def receive(self) -> Wire:
        """Returns the next message. Raises CandidateGone at the end, or if one is too long or invalid."""
        try:
            size_bytes = int.from_bytes(self._file.read(4), "big")
            if not 0 < size_bytes <= MAX_MESSAGE_BYTES:
                raise CandidateGone("no message")
            return json.loads(self._file.read(size_bytes))
        except (OSError, ValueError, RecursionError) as error:
            raise CandidateGone("no message") from error


# ---- the candidate's end ----


def serve(code: str) -> None:
    """Runs the candidate's text, then calls its functions as often as the judge asks."""
    channel, values = Channel(), Values()
    module = sys.modules["solution"] = ModuleType("solution")
    try:
        exec(compile(code, "<solution>", "exec"), vars(module))
    except BaseException as error:  # noqa: BLE001  a text that calls sys.exit() has no functions
        channel.send(_raised(error))
        return
    channel.send(["ready", [name for name, value in vars(module).items() if callable(value)]])
    while True:
        try:
            request = channel.receive()
        except CandidateGone:
            return
        channel.send(_answer(request, vars(module), values))


def _answer(request: Wire, names: dict[str, Any], values: Values) -> Wire:
    try:
        kind, target, *rest = request
        subject = names[target] if isinstance(target, str) else values.kept[target]
        if kind == "get":
            return ["value", values.written(getattr(subject, rest[0])), []]
        args, kwargs = values.read(rest[0]), values.read(rest[1])
        result = values.written(subject(*args, **kwargs))
        return ["value", result, [_changed(one, values) for one in args]]
    except BaseException as error:  # noqa: BLE001  whatever it raises is what the test gets
        return _raised(error)


def _changed(argument: Any, values: Values) -> Wire:
    """Returns an argument after the call, which the function may have changed in place."""
    return values.written(argument) if isinstance(argument, list | dict | set) else None


def _raised(error: BaseException) -> Wire:
    return ["raised", type(error).__name__, str(error)[:1000]]


# ---- the judge's end ----


class AnswerProcess:
    """The functions of the other process."""

    def __init__(self) -> None:
        self._channel = Channel()
        self._values = Values(self)

    def names(self) -> list[str]:
        """Returns the callables that its text defines. Raises CandidateGone if it could not be run."""
        match self._channel.receive():
            case ["ready", list()] as message:
                return [name for name in message[1] if isinstance(name, str)]
            case _:
                raise CandidateGone("it cannot be run")

    def call(self, target: str | int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.ask(["call", target, self._values.written(args), self._values.written(kwargs)], args)

    def ask(self, request: Wire, args: tuple[Any, ...] = ()) -> Any:
        """Calls the candidate. Raises its exception if it is Python's own, CandidateGone if it ended."""
        try:
            self._channel.send(request)
        except OSError as error:
            raise CandidateGone("it has ended") from error
        match self._channel.receive():
            case ["value", result, list()] as message:
                for argument, after in zip(args, message[2], strict=False):
                    _change(argument, self._values.read(after))
                return self._values.read(result)
            case ["raised", str(name), str(text)]:
                raise _exception(name)(text)
            case _:
                raise CandidateGone("no answer")


def _change(argument: Any, after: Any) -> None:
    """Copies the candidate's change of an argument to our own object."""
    if type(argument) is not type(after):
        return
    if _is_a(argument, list):
        argument[:] = after
    elif _is_a(argument, dict, set):
        argument.clear()
        argument.update(after)


def _exception(name: str) -> type[Exception]:
    """Returns Python's exception of this name, but none that ends a loop in silence, such as StopIteration in
    `all(map(f, cases))`."""
    found = getattr(builtins, name, None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return Exception
    return RuntimeError if issubclass(found, StopIteration | StopAsyncIteration) else found


def judge(steps: Sequence[tuple[str, bool]], entry_point: str | None) -> None:
    """Runs the steps of a test in order, and writes 1 or 0 for each that is one."""
    verdicts = os.dup(1)
    os.dup2(2, 1)  # What tests print is not what we say.
    names = _names(AnswerProcess(), entry_point, steps)
    for source, is_test in steps:
        passed = _passes(source, names)
        if is_test:
            os.write(verdicts, b"1" if passed else b"0")


def _names(
    candidate: AnswerProcess, entry_point: str | None, steps: Sequence[tuple[str, bool]]
) -> dict[str, Any]:
    """Returns the names that tests may use. Names to compare with are Python's own or the tests': a candidate
    that defines `all`, or a class `math` with an `isclose`, would judge itself."""
    try:
        defined = candidate.names()
    except CandidateGone:
        defined = []
    own, modules = _named_by(steps)
    # An entry point may be a path, such as Solution().solve.
    entries = set((entry_point or "").replace("()", "").split(".")) - {""}
    refused = {*dir(builtins), *own, *modules}
    kept = [name for name in defined if not name.startswith("__")]
    usable = [name for name in kept if (name in entries if entries else name not in refused)]
    names: dict[str, Any] = {name: RemoteObject(candidate, name) for name in usable}
    for name in modules - names.keys():
        with suppress(ImportError):
            names[name] = import_module(name)
    return names | {"__name__": "tests"}


def _named_by(steps: Sequence[tuple[str, bool]]) -> tuple[set[str], set[str]]:
    """Returns the names that the steps import or define, and the Python modules that they take attributes
    of."""
    import ast  # The candidate's end starts without it.

    own, modules = set[str](), set[str]()
    for source, _ in steps:
        with suppress(SyntaxError, ValueError, RecursionError):
            for node in ast.walk(ast.parse(source)):
                match node:
                    case ast.alias():
                        own.add(node.asname or node.name.partition(".")[0])
                    case ast.FunctionDef() | ast.ClassDef():
                        own.add(node.name)
                    case ast.Attribute(value=ast.Name(id=name)) if name in sys.stdlib_module_names:
                        modules.add(name)
                    case _:
                        pass
    return own, modules


def _passes(source: str, names: dict[str, Any]) -> bool:
    try:
        exec(compile(source, "<tests>", "exec"), names)
    except BaseException:  # noqa: BLE001  a test that raises has failed, and the next may pass
        return False
    return True

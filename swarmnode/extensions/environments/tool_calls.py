"""The policy's text, read as calls of tools. A wrong call is reported to the policy, never raised."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from swarmnode.extensions.environments.tools import misfit, read_as

MAX_CALLS = 16
"""Most calls of one turn; one more is refused, and the rest is not read."""

MAX_CALL_CHARS = 16_384
"""The longest call."""

MAX_LINE_CHARS = 1024
"""The longest call in the form of one line, which Python's parser reads."""

_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_LINE = re.compile(r"([A-Za-z_]\w{0,63})(?:\((?P<list>.*)\)|:(?P<text>.*))")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `problem`: the reason why it cannot be made, in words for the policy."""

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """A turn of the policy: the text outside of calls, and the calls."""

    content: str
    calls: tuple[ToolCall, ...]


def read_turn(said: str, tools: Mapping[str, Mapping[str, Any]]) -> SaidTurn:
    """Returns the calls and the other text of a turn; `tools`: the schemas of their arguments, by name
    (parameters_of).

    >>> add = {"add": {"properties": {"left": {"type": "integer"}, "right": {"type": "integer"}}}}
    >>> read_turn("add(1, right=2)", add).calls[0].arguments
    {'left': 1, 'right': 2}
    >>> read_turn('<tool_call>{"name": "mul", "arguments": {}}</tool_call>', add).calls[0].problem
    "there is no tool 'mul'; there are: add"
    """
    thought, mark, rest = said.rpartition("</think>")
    before, text = thought + mark, rest.strip()
    if "<tool_call>" in rest:
        found = [
            (match.group(1), bool(match.group(2)))
            for _, match in zip(range(MAX_CALLS + 1), _TAGGED.finditer(rest), strict=False)
        ]
        calls = [
            _from_json(body) if closed else _broken("<tool_call> without </tool_call>")
            for body, closed in found[:MAX_CALLS]
        ]
        if len(found) > MAX_CALLS:
            calls.append(_broken(f"more than {MAX_CALLS} calls in one turn"))
        checked = tuple(_checked(call, tools) for call in calls)
        return SaidTurn((before + _TAGGED.sub("", rest)).strip(), checked)
    call = _bare(text) or _line(text, tools)
    return SaidTurn(said if call is None else before, () if call is None else (_checked(call, tools),))


def _bare(text: str) -> ToolCall | None:
    """Returns the call that a whole turn is. None: the turn is something else."""
    if not (text.startswith("{") and text.endswith("}")):
        return None
    call = _from_json(text)
    return call if call.problem is None or re.match(r'\{\s*"name"', text) else None


def _from_json(text: str) -> ToolCall:
    if len(text) > MAX_CALL_CHARS:
        return _broken(f"a call has at most {MAX_CALL_CHARS} characters")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return _broken(f"a call must be JSON: {error}")
    match found:
        case {"name": str(name), "arguments": given} | {"name": str(name), "parameters": given}:
            if len(found) == 2 and isinstance(given, dict):
                return ToolCall(name, cast(dict[str, Any], given))
        case {"name": str(name)} if len(found) == 1:
            return ToolCall(name, {})
        case _:
            pass
    return _broken('a call is {"name": ..., "arguments": {...}}')


def _line(text: str, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    """Returns the call in one line. None: it is none. Only a line that begins with a tool's name is
    parsed."""
    if len(text) > MAX_LINE_CHARS or (match := _LINE.fullmatch(text)) is None or match[1] not in tools:
        return None
    name = match[1]
    known = cast(dict[str, Any], tools[name].get("properties") or {})
    if match["text"] is not None:
        return ToolCall(name, _separated(match["text"].strip(), known))
    try:
        call = ast.parse(f"f({match['list']})", mode="eval").body
        assert isinstance(call, ast.Call)
        values = [ast.literal_eval(value) for value in call.args]
        assert all(one.arg for one in call.keywords)
        named = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, TypeError, AssertionError, MemoryError, RecursionError):
        return _broken(f"{name}(...) takes numbers, true or false, and texts in quotes", name)
    if len(values) > len(known) or set(list(known)[: len(values)]) & named.keys():
        return _broken(f"{name} takes {', '.join(known) or 'nothing'}", name)
    return ToolCall(name, {**dict(zip(known, values, strict=False)), **named})


def _separated(text: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments behind a colon: the whole text for a single one, else its parts between
    commas."""
    if not text and not known:
        return {}
    parts = [text] if len(known) <= 1 else [part.strip() for part in text.split(",", len(known) - 1)]
    names = [*known, "argument"][: len(parts)]
    return {name: read_as(known.get(name, {}), part) for name, part in zip(names, parts, strict=True)}


def _checked(call: ToolCall, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    if call.problem is not None:
        return call
    if call.name not in tools:
        problem = f"there is no tool {call.name!r:.60}; there are: {', '.join(tools)}"
    else:
        problem = misfit(tools[call.name], call.arguments)
    return ToolCall(call.name, call.arguments, problem)


def _broken(problem: str, name: str = "") -> ToolCall:
    return ToolCall(name, {}, problem)

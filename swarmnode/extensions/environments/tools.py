"""Functions as tools: their descriptions for a policy, and the check of the arguments that it passes."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, cast, get_args, get_origin

from swarmnode.errors import TaskError

MAX_TOOLS = 64
"""Tools that one prompt may offer."""

_PLAIN: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_KINDS: dict[str, Any] = {name: kind for kind, name in _PLAIN.items()} | {"number": int | float}

_ARGS = re.compile(r"\n\s*Args:\n(.*?)(?:\n\s*(?:Returns|Raises):|\Z)", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n(.*?)(?:\n\s*Raises:|\Z)", re.DOTALL)
_SECTION = re.compile(r"\n\s*(?:Args|Returns|Raises):")
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that a policy may call."""

    name: str
    schema: Mapping[str, Any]
    """Tool schema for chat templates: {"type": "function", "function": {...}}."""
    function: Callable[..., Any]


def tool_of(given: object) -> Tool:
    """Returns a function as a tool. Raises TaskError if its signature cannot be described to a policy.

    >>> def add(left: int, right: int) -> int:
    ...     '''Adds two numbers.'''
    ...     return left + right
    >>> tool_of(add).schema["function"]["parameters"]["required"]
    ['left', 'right']
    """
    if isinstance(given, Tool):
        return given
    if not callable(given):
        raise TaskError(f"{given!r:.80} is not a tool", hint="list functions: tools = [add, look_up]")
    name = getattr(given, "__name__", type(given).__name__)
    return Tool(name, {"type": "function", "function": _described(name, given)}, given)


def tools_from(given: Iterable[object]) -> dict[str, Tool]:
    """Returns the tools by name. Raises TaskError."""
    found: dict[str, Tool] = {}
    for tool in map(tool_of, given):
        if tool.name in found:
            raise TaskError(f"two tools are called {tool.name}", hint="rename one function or method")
        found[tool.name] = tool
    if not 0 < len(found) <= MAX_TOOLS:
        raise TaskError(f"there are {len(found)} tools", hint=f"offer 1 to {MAX_TOOLS}")
    return found


def parameters_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a tool's schema that describes its arguments."""
    return cast(Mapping[str, Any], schema["function"].get("parameters") or {})


def misfit(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Returns the first fault in the arguments of a call, or None.

    >>> misfit({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, {"n": "7"})
    'n must be integer'
    """
    known = cast(Mapping[str, Any], parameters.get("properties") or {})
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"{name} is missing"
    for name, value in arguments.items():
        if name not in known:
            return f"there is no argument {name!r:.60}"
        if not _fits(known[name], value):
            return f"{name} must be {_wanted(known[name])}"
    return None


def read_as(schema: Mapping[str, Any], text: str) -> Any:
    """Returns the value of an unquoted text, read by its schema's type; the text itself without one.

    >>> read_as({"type": "integer"}, "-7"), read_as({"type": "string"}, "7")
    (-7, '7')
    """
    match schema.get("type"):
        case "integer" if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            return int(text)
        case "number" if re.fullmatch(r"[+-]?[0-9]{1,18}(\.[0-9]{0,18})?", text):
            return float(text)
        case "boolean" if text.lower() in ("true", "false"):
            return text.lower() == "true"
        case _:
            return text


def _fits(schema: Mapping[str, Any], value: Any) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(one, value) for one in schema["anyOf"])
    if "enum" in schema and not any(type(value) is type(one) and value == one for one in schema["enum"]):
        return False
    wanted = schema.get("type")
    names = cast(list[Any], wanted) if isinstance(wanted, list) else [wanted]
    return wanted is None or any(_is(str(name), value, schema) for name in names)


def _is(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, bool) and name in ("integer", "number"):
        return False
    if not isinstance(value, _KINDS.get(name, object)):
        return False
    if name == "array":
        return _are(schema, cast(list[Any], value))
    inner = schema.get("additionalProperties")
    values = cast(dict[Any, Any], value).values() if name == "object" and isinstance(inner, dict) else ()
    return all(_fits(cast(Any, inner), one) for one in values)


def _are(schema: Mapping[str, Any], values: list[Any]) -> bool:
    places = schema.get("prefixItems")
    if places is not None:
        return len(places) == len(values) and all(map(_fits, places, values))
    return "items" not in schema or all(_fits(schema["items"], value) for value in values)


def _wanted(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    wanted = schema.get("type", "something else")
    return " or ".join(cast(list[str], wanted)) if isinstance(wanted, list) else str(wanted)


# ---- the schema of a function ----


def _described(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    doc = inspect.getdoc(function)
    if not doc:
        raise TaskError(f"tool {name} has no docstring", hint="the policy reads it: say what the tool does")
    told = _told_arguments(doc)
    parameters, hints = _signature(name, function)
    properties: dict[str, Any] = {}
    for parameter in parameters:
        schema = _schema(hints[parameter.name], f"argument {parameter.name} of tool {name}")
        if parameter.name in told:
            schema["description"] = told[parameter.name]
        properties[parameter.name] = schema
    described: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [one.name for one in parameters if one.default is one.empty]:
        described["required"] = required
    output = {"name": name, "description": _SECTION.split(doc)[0].strip(), "parameters": described}
    if "return" in hints:
        returned = _schema(hints["return"], f"what tool {name} returns")
        if (said := _RETURNS.search(doc)) is not None:
            returned["description"] = said.group(1).strip()
        output["return"] = returned
    return output


def _signature(name: str, function: Callable[..., Any]) -> tuple[list[inspect.Parameter], Mapping[str, Any]]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
        hints = typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except (TypeError, ValueError, NameError) as error:
        raise TaskError(f"tool {name} cannot be described: {error}") from error
    for parameter in parameters:
        if parameter.name not in hints or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise TaskError(
                f"argument {parameter.name} of tool {name} has no type, or no name to pass it by",
                hint=f"write: def {name}({parameter.name}: str)",
            )
    return parameters, hints


def _told_arguments(doc: str) -> dict[str, str]:
    found: dict[str, str] = {}
    section = _ARGS.search(doc)
    name = ""
    for line in section.group(1).splitlines() if section else ():
        if (match := _ARGUMENT.match(line)) is not None:
            name = match.group(1)
            found[name] = match.group(2).strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _schema(hint: Any, what: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None and isinstance(hint, type):
        return {"type": _PLAIN[hint]} if hint in _PLAIN else _refuse(hint, what)
    if origin is Union or origin is types.UnionType:
        return _union([_schema(one, what) for one in inner if one is not type(None)], type(None) in inner)
    if origin is Literal:
        kinds = list(dict.fromkeys(_PLAIN.get(type(one), "object") for one in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], what)}
    if origin is tuple and inner and ... not in inner:
        return {"type": "array", "prefixItems": [_schema(one, what) for one in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], what)}
    return _refuse(hint, what)


def _union(schemas: list[dict[str, Any]], nullable: bool) -> dict[str, Any]:
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(one.keys() == {"type"} for one in schemas):
        schema = {"type": sorted({one["type"] for one in schemas})}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if nullable else schema


def _refuse(hint: Any, what: str) -> dict[str, Any]:
    raise TaskError(
        f"{what} is {hint!r:.60}, which JSON cannot express",
        hint="use str, int, float, bool, list[...], dict[str, ...], Literal[...] or a union of them",
    )

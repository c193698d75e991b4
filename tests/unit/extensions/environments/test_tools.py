"""What a policy is told of functions, and how what it says is read as calls of them."""

import json
from typing import Any, Literal

import pytest

from swarmnode.errors import TaskError
from swarmnode.extensions.environments.tool_calls import MAX_CALL_CHARS, MAX_CALLS, read_turn
from swarmnode.extensions.environments.tools import parameters_of, tool_of, tools_from


def add(left: int, right: int = 0) -> int:
    """Adds two numbers.

    Args:
        left: The first,
            of two lines.
        right: The second.

    Returns:
        Their sum.
    """
    return left + right


def look(text: str, where: Literal["top", "end"], lines: list[int] | None = None, exact: bool = True) -> str:
    """Looks for a text.

    It reads all of it.

    Args:
        text: What to look for.
        where: Where.
        lines: Which lines.
        exact: As it stands?
    """
    return f"{text} {where} {lines} {exact}"


def weigh(value: int | str, table: dict[str, float], pair: tuple[int, str], number: float) -> None:
    """Weighs.

    Args:
        value: Anything.
        table: Weights.
        pair: Two.
        number: One.
    """


TOOLS = {name: parameters_of(tool.schema) for name, tool in tools_from([add, look]).items()}


@pytest.mark.parametrize("function", [add, look, weigh])
def test_a_schema_is_that_of_transformers(function: Any) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    assert tool_of(function).schema == get_json_schema(function)


def untyped(left) -> int:  # pyright: ignore
    """Adds."""
    return left


def silent(left: int) -> int:
    return left


def anything(value: object) -> int:
    """Takes anything."""
    return 0


def loose(*values: int) -> int:
    """Adds all."""
    return sum(values)


@pytest.mark.parametrize("function", [untyped, silent, anything, loose, "add"])
def test_what_a_policy_could_not_be_told_of_is_refused(function: Any) -> None:
    with pytest.raises(TaskError):
        tools_from([function])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(TaskError, match="two tools"):
        tools_from([add, add])


def called(said: str) -> list[tuple[str, dict[str, Any]]]:
    calls = read_turn(said, TOOLS).calls
    assert all(call.problem is None for call in calls), calls
    return [(call.name, dict(call.arguments)) for call in calls]


def problem(said: str) -> str:
    (call,) = read_turn(said, TOOLS).calls
    assert call.problem is not None
    return call.problem


ONE = [("add", {"left": 1, "right": 2})]


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>\n{"name": "add", "arguments": {"left": 1, "right": 2}}\n</tool_call>',
        '{"name": "add", "parameters": {"left": 1, "right": 2}}',
        ' {"name": "add", "arguments": {"left": 1, "right": 2}}\n',
        "add(1, 2)",
        "add(1, right=2)",
        "add: 1, 2",
        '<think>add(7)? No.</think>\n{"name": "add", "arguments": {"left": 1, "right": 2}}',
    ],
)
def test_a_call_is_understood_in_each_form(said: str) -> None:
    assert called(said) == ONE


def test_several_calls_of_a_turn_keep_their_order_and_the_rest_is_content() -> None:
    call = json.dumps({"name": "add", "arguments": {"left": 1}})
    turn = read_turn(f"Let me see. <tool_call>{call}</tool_call><tool_call>{call}</tool_call>", TOOLS)
    assert [dict(one.arguments) for one in turn.calls] == [{"left": 1}] * 2
    assert turn.content == "Let me see."


@pytest.mark.parametrize(
    "said", ["The sum is 3.", "{not json}", '{"answer": 3}', "sub: 1", "add\n1", "I add: 1", "", "[]", "{}"]
)
def test_what_is_no_call_is_an_answer(said: str) -> None:
    turn = read_turn(said, TOOLS)
    assert (turn.content, turn.calls) == (said, ())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("<tool_call>add(1)</tool_call>", "must be JSON"),
        ('<tool_call>{"name": "add"', "without </tool_call>"),
        (
            '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
            "there is no tool 'sub'; there are: add",
        ),
        ('<tool_call>{"name": "add", "arguments": {"left": "1"}}</tool_call>', "left must be integer"),
        ('<tool_call>{"name": "add", "arguments": {"left": true}}</tool_call>', "left must be integer"),
        ('<tool_call>{"name": "add", "arguments": {"left": 1.5}}</tool_call>', "left must be integer"),
        ('<tool_call>{"name": "add", "arguments": {"left": null}}</tool_call>', "left must be integer"),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "left is missing"),
        ('<tool_call>{"name": "add", "arguments": {"left": 1, "up": 2}}</tool_call>', "no argument 'up'"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "a call is"),
        ('<tool_call>{"name": "add", "arguments": {}, "id": 3}</tool_call>', "a call is"),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", "must be JSON"),
        ("<tool_call>" + "9" * 5000 + "</tool_call>", "a call"),
        ("<tool_call>" + " " * (MAX_CALL_CHARS + 1) + "</tool_call>", "at most"),
        ('{"name": 3}', "a call is"),
        ('look("a", where="middle")', "where must be one of 'top', 'end'"),
        ("add(__import__('os'))", "takes numbers"),
        ("add(" + "(" * 900 + ")", "takes numbers"),
        ("add(1, 2, 3)", "add takes left, right"),
        ("add(1, left=2)", "add takes left, right"),
        ("add(*[1])", "takes numbers"),
        ("add(**{})", "takes numbers"),
        ("add: one", "left must be integer"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(said: str, told: str) -> None:
    assert told in problem(said)


def test_more_calls_than_a_turn_may_have_are_not_read() -> None:
    calls = read_turn('<tool_call>{"name": "add", "arguments": {"left": 1}}</tool_call>' * 5000, TOOLS).calls
    assert len(calls) == MAX_CALLS + 1
    assert calls[-1].problem == f"more than {MAX_CALLS} calls in one turn"

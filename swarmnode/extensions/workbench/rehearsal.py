"""Rehearsal: one episode of an environment, played without a policy, to see that it answers, and always
alike."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, cast

from swarmnode.chat import Turn, tools_of
from swarmnode.extensions.environments.tools import parameters_of
from swarmnode.extensions.workbench.probes import answer_of
from swarmnode.tasks.task import Environment, score_strictly
from swarmnode.types import Example, Scores

WORDS = ("1", "?", "a", "yes", "2")
"""Turns of the rehearsal if there are no tools to call."""

SHOWN_BEFORE = 20
"""Characters shown of the common beginning of two answers, before they differ."""

_SAMPLES: Mapping[str, Any] = {
    "integer": 1,
    "number": 1.0,
    "string": "a",
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The episode and its scores."""

    turns: tuple[Turn, ...]
    scores: Scores
    difference: str = ""
    """Difference in observations or scores between two plays or two processes. Empty: none was found."""


def rehearse(task: Environment, example: Example) -> Rehearsal:
    """Plays an episode and scores it. Raises TaskError, JudgementLost."""
    turns: list[Turn] = []
    for said in islice(_lines(example), task.most_turns):
        observed = task.observe(example, [*turns, Turn(said)])
        turns.append(Turn(said, observed or ()))
        if observed is None:
            break
    turns[-1] = Turn(turns[-1].said)
    (scores,) = score_strictly(task, example, [tuple(turns)])
    return Rehearsal(tuple(turns), scores)


def difference_of(one: Rehearsal, other: Rehearsal) -> str:
    """Returns the first difference of two episodes in short: the turn, its text and both answers. Empty:
    there is none.

    >>> said = Rehearsal((Turn("roll()", ({"role": "tool", "content": "4"},)),), {})
    >>> difference_of(said, Rehearsal((Turn("roll()"),), {}))
    "turn 1, 'roll()': '4', then ''"
    """
    for number, (here, there) in enumerate(zip(one.turns, other.turns, strict=False), 1):
        if here != there:
            said = here.said.removeprefix("<tool_call>").removesuffix("</tool_call>")
            return f"turn {number}, {said!r:.80}: {_apart(_heard(here), _heard(there))}"
    if one != other:
        return f"the rewards: {dict(one.scores)}, then {dict(other.scores)}"
    return ""


def _heard(turn: Turn) -> str:
    return "\n".join(message["content"] for message in turn.observed)


def _apart(one: str, other: str) -> str:
    """Returns two texts from their first difference on, with a little of the common text before it."""
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    start = max(0, alike - SHOWN_BEFORE)
    cut = "..." if start else ""
    return f"{cut + one[start:]!r:.80}, then {cut + other[start:]!r:.80}"


def _lines(example: Example) -> Iterator[str]:
    tools = tools_of(example.prompt)
    for tool in tools:
        call = {"name": tool["function"]["name"], "arguments": _arguments(tool)}
        yield f"<tool_call>{json.dumps(call)}</tool_call>"
    if not tools:
        yield from WORDS
    yield answer_of(example) or "?"


def _arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for the required arguments in a tool's schema."""
    parameters = parameters_of(tool)
    known: Mapping[str, Any] = parameters.get("properties") or {}
    return {name: _sample(known.get(name, {})) for name in parameters.get("required") or ()}


def _sample(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if "prefixItems" in schema:
        return [_sample(one) for one in schema["prefixItems"]]
    if "anyOf" in schema:
        return _sample(schema["anyOf"][0])
    kind = schema.get("type")
    return _SAMPLES.get(str(cast(list[Any], kind)[0] if isinstance(kind, list) else kind), "a")

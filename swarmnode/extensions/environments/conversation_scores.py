"""Conversations as rewards are shown them, and their scores.

turns -> [conversation] -> completions on TRL's contract -> [score_turns] -> scores
"""

from collections.abc import Mapping, Sequence
from typing import Any

from swarmnode.chat import Said, Turn, tools_of, turns_of
from swarmnode.extensions.environments.tool_calls import read_turn
from swarmnode.extensions.environments.tools import parameters_of
from swarmnode.tasks.judging.plain_rewards import final_answer
from swarmnode.tasks.judging.rewards import Reward, score_with
from swarmnode.types import Example

# ---- what rewards are shown ----


def conversation(example: Example, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Returns a completion as TRL has it: messages of the assistant, with `tool_calls` if it called tools,
    and the messages that answered them."""
    known = {tool["function"]["name"]: parameters_of(tool) for tool in tools_of(example.prompt)}
    messages: list[dict[str, Any]] = []
    for turn in turns:
        said = read_turn(turn.said, known) if known else None
        calls = said.calls if said is not None else ()
        message: dict[str, Any] = {"role": "assistant", "content": turn.said}
        if said is not None and calls:
            made = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
            message["content"] = said.content
            message["tool_calls"] = [{"type": "function", "function": function} for function in made]
        messages.append(message)
        names = [call.name for call in calls] if len(calls) == len(turn.observed) else []
        for number, answer in enumerate(turn.observed):
            named = answer["role"] == "tool" and number < len(names)
            messages.append({**answer, **({"name": names[number]} if named else {})})
    return messages


def final_answers(example: Example, told: Sequence[Said]) -> list[str]:
    """Returns the policy's last message of each episode, as rewards read it."""
    return [final_answer(conversation(example, turns_of(said))) for said in told]


def score_turns(
    rewards: Mapping[str, Reward],
    example: Example,
    told: Sequence[Sequence[Turn]],
    given: Mapping[str, Sequence[Any]],
    *,
    held_out: bool,
) -> list[Mapping[str, float | None]]:
    """Scores conversations with several named rewards. `given`: further arguments of TRL's contract, such as
    `environments`; `held_out`: see `score_with`. Raises TaskError."""
    if not told:
        return []
    texts = ["".join(turn.said for turn in turns) for turns in told]
    instead = {"completions": [conversation(example, turns) for turns in told], **given}
    return score_with(rewards, example, texts, held_out=held_out, instead=instead)

"""Conversations as texts: one that stands for the messages of a prompt, one for the turns of a completion.

tasks (rows.py) -> [chat_text] -> Example.prompt -> types.messages_of -> group.py, rewards.py
turns of a policy and an environment -> [transcript] -> Completion.text -> [turns_of] -> Environment.score

A prompt is a text everywhere: it is hashed to hold it out, compared, kept in books and checkpoints. That of a
single message of the user is what the user says; any other conversation is written as JSON behind a mark that
no prompt begins with. Tools that the policy may call are part of the prompt.

What a policy and an environment said to each other is one text in the same way. Only what a task that is an
environment gets is ever read so: a policy may write the mark itself.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from swarmnode.types import CHAT_MARK, Message, messages_of

ROLES = ("system", "developer", "user", "assistant")


def chat_text(messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The prompt that stands for a conversation in which these tools (JSON schemas) may be called, the same
    on every machine.

    >>> chat_text([{"role": "user", "content": "2 + 2 ="}])
    '2 + 2 ='
    >>> chat_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="}])[:20]
    '\\x02[{"role":"system","'
    """
    if not tools and len(messages) == 1 and messages[0]["role"] == "user":
        said = messages[0]["content"]
        if not said.startswith(CHAT_MARK):
            return said
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    return CHAT_MARK + _written({"tools": list(tools), "messages": plain} if tools else plain)


def asked_of(prompt: str) -> str:
    """A prompt as people read it: what the user says last, and what was said before it by whom, without the
    schemas of tools.

    >>> brief = {"role": "system", "content": "Be brief."}
    >>> asked_of(chat_text([brief, {"role": "user", "content": "2 + 2 ="}]))
    '2 + 2 = (before: system: Be brief.)'
    """
    *before, last = messages_of(prompt)
    said = ", ".join(f"{message['role']}: {message['content']}" for message in before)
    return f"{last['content']} (before: {said})" if before else last["content"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said, and what the environment answered."""

    said: str
    observed: tuple[Message, ...] = ()
    """Messages of role `tool` or `user`. Empty: the policy's last turn, or one that is not answered yet."""


def transcript(turns: Sequence[Turn]) -> str:
    """The text that stands for these turns.

    >>> transcript([Turn("ask", ({"role": "tool", "content": "7"},)), Turn("It is 7.")])
    '\\x02[["ask",[["tool","7"]]],["It is 7.",[]]]'
    """
    rows = [
        [turn.said, [[message["role"], message["content"]] for message in turn.observed]] for turn in turns
    ]
    return CHAT_MARK + _written(rows)


def turns_of(text: str) -> tuple[Turn, ...]:
    """The turns that a text stands for. Raises ValueError for one that `transcript` did not write.

    >>> turns_of(transcript([Turn("ask", ({"role": "tool", "content": "7"},))]))
    (Turn(said='ask', observed=({'role': 'tool', 'content': '7'},)),)
    """
    if not text.startswith(CHAT_MARK):
        raise ValueError("this is no transcript")
    try:
        rows = msgspec.json.decode(text.removeprefix(CHAT_MARK), type=list[_Row])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"this is no transcript: {error}") from error
    return tuple(
        Turn(said, tuple({"role": role, "content": content} for role, content in observed))
        for said, observed in rows
    )


_Row = tuple[str, list[tuple[str, str]]]
"""A turn as it is written."""


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

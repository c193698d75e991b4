"""Conversations as texts: one form for the messages of a prompt, one for the turns of a completion."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from swarmnode.types import CHAT_MARK, Message, messages_of

ROLES = ("system", "developer", "user", "assistant")


def chat_text(messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the prompt that encodes a conversation in which these tools (JSON schemas) may be called, the
    same on every machine.

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
    """Returns a prompt for people to read: the user's last message, then the earlier ones with their roles,
    without the schemas of tools.

    >>> brief = {"role": "system", "content": "Be brief."}
    >>> asked_of(chat_text([brief, {"role": "user", "content": "2 + 2 ="}]))
    '2 + 2 = (before: system: Be brief.)'
    """
    *before, last = messages_of(prompt)
    said = ", ".join(f"{message['role']}: {message['content']}" for message in before)
    return f"{last['content']} (before: {said})" if before else last["content"]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy, with the environment's answer."""

    said: str
    observed: tuple[Message, ...] = ()
    """Messages of role `tool` or `user`. Empty: the policy's last turn, or one that is not answered yet."""


def transcript(turns: Sequence[Turn]) -> str:
    """Returns the text that encodes these turns.

    >>> transcript([Turn("ask", ({"role": "tool", "content": "7"},)), Turn("It is 7.")])
    '\\x02[["ask",[["tool","7"]]],["It is 7.",[]]]'
    """
    rows = [
        [turn.said, [[message["role"], message["content"]] for message in turn.observed]] for turn in turns
    ]
    return CHAT_MARK + _written(rows)


def turns_of(text: str) -> tuple[Turn, ...]:
    """Returns the turns that a text encodes. Raises ValueError for one that `transcript` did not write.

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

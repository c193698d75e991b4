"""What a policy is asked and what it says: messages, prompts and turns, and a prompt's one form as text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Message = dict[str, str]
"""A message: {"role": ..., "content": ...}."""

ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt of several messages, or one that offers tools. The last message is the user's."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that may be called, in the form that chat templates take."""

    def __hash__(self) -> int:
        return hash(written_prompt(self))


Prompt = str | Conversation
"""A question: a text, which is one message of the user, or a conversation."""


def prompt_of(messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
    """Returns the prompt of these messages, in which these tools (JSON schemas) may be called.

    >>> prompt_of([{"role": "user", "content": "2 + 2 ="}])
    '2 + 2 ='
    >>> prompt_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]).messages[0]
    {'role': 'system', 'content': 'Be brief.'}
    """
    if not tools and len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    plain = ({"role": message["role"], "content": message["content"]} for message in messages)
    return Conversation(tuple(plain), tuple(tools))


def messages_of(prompt: Prompt) -> list[Message]:
    """Returns a prompt as messages.

    >>> messages_of("2 + 2 =")
    [{'role': 'user', 'content': '2 + 2 ='}]
    """
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt.messages)


def tools_of(prompt: Prompt) -> list[Mapping[str, Any]]:
    """Returns the JSON schemas of the tools that a prompt offers.

    >>> tools_of("2 + 2 =")
    []
    """
    return [] if isinstance(prompt, str) else list(prompt.tools)


def asked_of(prompt: Prompt) -> str:
    """Returns a prompt for people to read: the user's last message, then the earlier ones with their roles,
    without the schemas of tools.

    >>> brief = {"role": "system", "content": "Be brief."}
    >>> asked_of(prompt_of([brief, {"role": "user", "content": "2 + 2 ="}]))
    '2 + 2 = (before: system: Be brief.)'
    """
    *before, last = messages_of(prompt)
    said = ", ".join(f"{message['role']}: {message['content']}" for message in before)
    return f"{last['content']} (before: {said})" if before else last["content"]


# ---- a prompt as text: in checkpoints, between processes, and where its digest decides ----

_MARK = "\x02"
"""Start of text, in ASCII. What is written of a conversation begins with it."""


def written_prompt(prompt: Prompt) -> str:
    """Returns a prompt as one text, the same on every machine.

    >>> written_prompt(prompt_of([{"role": "system", "content": "Be brief."}]))
    '\\x02[{"role":"system","content":"Be brief."}]'
    """
    if isinstance(prompt, str) and not prompt.startswith(_MARK):
        return prompt
    messages, tools = messages_of(prompt), tools_of(prompt)
    value = {"tools": tools, "messages": messages} if tools else messages
    return _MARK + json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_prompt(text: str) -> Prompt:
    """Returns the prompt that `written_prompt` wrote.

    >>> read_prompt("2 + 2 =")
    '2 + 2 ='
    """
    if not text.startswith(_MARK):
        return text
    found = json.loads(text.removeprefix(_MARK))
    return prompt_of(found["messages"], found["tools"]) if isinstance(found, dict) else prompt_of(found)


# ---- what a policy says ----


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
    return _MARK + json.dumps(rows, ensure_ascii=False, separators=(",", ":"))


def turns_of(text: str) -> tuple[Turn, ...]:
    """Returns the turns that a text encodes. Raises ValueError for one that `transcript` did not write.

    >>> turns_of(transcript([Turn("ask", ({"role": "tool", "content": "7"},))]))
    (Turn(said='ask', observed=({'role': 'tool', 'content': '7'},)),)
    """
    if not text.startswith(_MARK):
        raise ValueError("this is no transcript")
    try:
        rows = msgspec.json.decode(text.removeprefix(_MARK), type=list[_Row])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"this is no transcript: {error}") from error
    return tuple(
        Turn(said, tuple({"role": role, "content": content} for role, content in observed))
        for said, observed in rows
    )


_Row = tuple[str, list[tuple[str, str]]]
"""A turn as it is written."""

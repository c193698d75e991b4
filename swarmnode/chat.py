"""Messages, the prompts and turns made of them, and the text form of a prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        return hash(tuple(message["content"] for message in self.messages))


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


# ---- a prompt as text: in checkpoints, between processes, and in digests ----

_MARK = "\x02"
"""Start of text, in ASCII. It begins the text form of a conversation and no other text."""


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
    found: Any = json.loads(text.removeprefix(_MARK))
    return prompt_of(found["messages"], found["tools"]) if "tools" in found else prompt_of(found)


# ---- answers of a policy ----


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy, with the environment's answer."""

    said: str
    observed: tuple[Message, ...] = ()
    """Messages of role `tool` or `user`. Empty: the policy's last turn, or one that is not answered yet."""

    def __hash__(self) -> int:
        return hash(self.said)


Said = str | tuple[Turn, ...]
"""A policy's answer: one text, or in an environment the turns of an episode."""


def turns_of(said: Said) -> tuple[Turn, ...]:
    """Returns an answer as turns; a text is a single one.

    >>> turns_of("42")
    (Turn(said='42', observed=()),)
    """
    return (Turn(said),) if isinstance(said, str) else said or (Turn(""),)


def said_in_lines(said: Said) -> str:
    """Returns an answer for people to read: a text unchanged, or all that was said in an episode, in lines.

    >>> said_in_lines((Turn("ask", ({"role": "tool", "content": "7"},)), Turn("It is 7.")))
    'ask\\n[tool] 7\\nIt is 7.'
    """
    lines: list[str] = []
    for turn in turns_of(said):
        lines += [turn.said, *(f"[{heard['role']}] {heard['content']}" for heard in turn.observed)]
    return "\n".join(lines)

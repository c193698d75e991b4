"""Conversations as prompts: one text that stands for a list of messages.

tasks (rows.py) -> [chat_text] -> Example.prompt -> types.messages_of -> group.py, rewards.py

A prompt is a text everywhere: it is hashed to hold it out, compared, kept in books and checkpoints. That of a
single message of the user is what the user says; any other conversation is written as JSON behind a mark that
no prompt begins with.
"""

import json
from collections.abc import Mapping, Sequence

from swarmnode.types import CHAT_MARK

ROLES = ("system", "developer", "user", "assistant")


def chat_text(messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt that stands for a conversation, the same on every machine.

    >>> chat_text([{"role": "user", "content": "2 + 2 ="}])
    '2 + 2 ='
    >>> chat_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="}])[:20]
    '\\x02[{"role":"system","'
    """
    if len(messages) == 1 and messages[0]["role"] == "user":
        said = messages[0]["content"]
        if not said.startswith(CHAT_MARK):
            return said
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    return CHAT_MARK + json.dumps(plain, ensure_ascii=False, separators=(",", ":"))

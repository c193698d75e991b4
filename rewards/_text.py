"""A completion as text, whether it came as a string or as a conversation."""

from typing import Any

Completion = str | list[dict[str, Any]]
"""What TRL hands to a reward: the text itself, or the messages that the policy wrote."""


def text_of(completion: Completion) -> str:
    """The text that the policy wrote.

    >>> text_of([{"role": "assistant", "content": "42"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion if isinstance(message.get("content"), str))

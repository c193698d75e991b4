"""A completion as text, whether it came as a string or as a conversation."""

from typing import Any

Completion = str | list[dict[str, Any]]
"""What TRL hands to a reward: the text itself, or the messages that the policy wrote."""


def text_of(completion: Completion) -> str:
    """The text that the policy wrote; of a conversation with tools, what it said last.

    >>> text_of([{"role": "assistant", "content": "42"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    asked = [place for place, message in enumerate(completion) if message.get("role") in ("tool", "user")]
    last = completion[asked[-1] + 1 :] if asked else completion
    return "".join(message["content"] for message in last if isinstance(message.get("content"), str))

"""A completion as text, whether it came as a string or as a conversation."""

from decimal import Decimal
from typing import Any

Completion = str | list[dict[str, Any]]
"""What TRL hands to a reward: the text itself, or the messages that the policy wrote."""


def text_of(completion: Completion) -> str:
    """The text that the policy wrote; of a conversation, its last turn: what it said before, and what tools
    and users said, is no answer of its.

    >>> text_of([{"role": "assistant", "content": "42"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    last = list[str]()
    for message in reversed(completion):
        if message.get("role") in ("tool", "user"):
            if last:
                break
        elif isinstance(message.get("content"), str):
            last.insert(0, message["content"])
    return "".join(last)


Answer = str | int | float
"""What an `answer` column holds: text, a number, or True and False."""


def text_of_answer(answer: object) -> str:
    """The answer as a person writes it: 2.0 without its point, no number with an exponent.

    >>> text_of_answer(2), text_of_answer(2.0), text_of_answer(1e-7), text_of_answer(" two ")
    ('2', '2', '0.0000001', ' two ')
    """
    if not isinstance(answer, str | int | float):
        raise TypeError(f"an answer is {answer!r:.40}, no text and no number")
    if isinstance(answer, float):
        return str(int(answer)) if answer.is_integer() else f"{Decimal(repr(answer)):f}"
    return str(answer)


def spellings_of(answer: Answer) -> tuple[str, ...]:
    """Every way to write an answer: of text only its own, without white space around it.

    >>> spellings_of(2.0), spellings_of(True), spellings_of(" 2.0 ")
    (('2', '2.0'), ('True', 'true'), ('2.0',))
    """
    text = text_of_answer(answer).strip()
    if isinstance(answer, bool):
        return text, text.lower()
    return (text, repr(answer)) if isinstance(answer, float) else (text,)

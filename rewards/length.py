"""Pressure on length: a penalty for running into a limit, and a bonus for being brief.

In characters, not tokens: nodes with different tokenizers must agree on the reward of one text.
"""

from collections.abc import Callable
from typing import Any

from ._text import Completion, text_of

CONCISE_CHARS = 1000
"""`concise` falls to zero at this length, about 250 tokens of English."""

Reward = Callable[..., list[float | None]]


def soft_overlong(max_chars: int, soft_chars: int) -> Reward:
    """DAPO's soft overlong punishment (Yu et al. 2025, section 3.4), for answers of at most `max_chars`.

    0.0 as long as `soft_chars` are left, then a straight line down to -1.0 at the limit.

    >>> soft_overlong(10, 4)(["?"] * 3, ["six...", "eight...", "more than ten"])
    [0.0, -0.5, -1.0]
    """

    def soft_overlong_punishment(
        prompts: list[Any],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        return [_overlong(len(text_of(completion)), max_chars, soft_chars) for completion in completions]

    return soft_overlong_punishment


def _overlong(length: int, limit: int, soft: int) -> float:
    free = limit - soft
    return 0.0 if length <= free else max(-1.0, (free - length) / soft)


def concise(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1.0 for an empty completion, falling in a straight line to 0.0 at CONCISE_CHARS characters.

    >>> concise(["?"], ["x" * 250])
    [0.75]
    """
    return [max(0.0, 1.0 - len(text_of(completion)) / CONCISE_CHARS) for completion in completions]

"""Did the policy write its answer in the requested form? Says nothing about whether it is right."""

from typing import Any

from ._text import Completion, text_of


def think_format(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1.0 for one `<think>...</think>` at the beginning with an answer after it; else 0.0.

    >>> think_format(["?"], ["<think>two and two</think>4"])
    [1.0]
    """
    return [float(_thinks_then_answers(text_of(completion))) for completion in completions]


def answer_tags(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1.0 for `<think>...</think>` followed by exactly one `<answer>...</answer>` at the end; else 0.0.

    >>> answer_tags(["?"], ["<think>two and two</think> <answer>4</answer>"])
    [1.0]
    """
    return [float(_thinks_then_tags(text_of(completion))) for completion in completions]


def _thinks_then_answers(text: str) -> bool:
    return _once(text, "<think>", "</think>") and bool(text.rpartition("</think>")[2].strip())


def _thinks_then_tags(text: str) -> bool:
    tail = text.rpartition("</think>")[2].strip()
    return (
        _once(text, "<think>", "</think>")
        and _once(tail, "<answer>", "</answer>")
        and tail.endswith("</answer>")
    )


def _once(text: str, opening: str, closing: str) -> bool:
    """Whether the text begins with `opening` and has one of each, in this order."""
    begins = text.lstrip().startswith(opening)
    return begins and text.count(opening) == 1 and text.count(closing) == 1

"""The answer, the whole answer, and nothing but the answer."""

from typing import Any

from ._text import Answer, Completion, spellings_of, text_of


def exact_match(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    *,
    answer: list[Answer],
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion, without surrounding white space, is the `answer` column; else 0.0. Answers
    that are numbers or truth values are what people write for them: 2.0 is "2" or "2.0".

    >>> exact_match(["2+2="], [" 4"], answer=["4"])
    [1.0]
    """
    return [float(text_of(c).strip() in spellings_of(a)) for c, a in zip(completions, answer, strict=True)]

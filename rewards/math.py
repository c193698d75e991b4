r"""Right numbers: the last one of a completion, or the one in \boxed{}.

Numbers are compared as exact fractions, so 0.5, 1/2, 50% and \frac{1}{2} are one and the same. Text comes
from strangers: every pattern is linear and a number has at most MAX_DIGITS characters, so none is expensive.

What stands before the answer is not read: any text in front of it has full marks, too. strict.py has forms
of these that read all of it.
"""

import re
from fractions import Fraction
from typing import Any

from ._text import Answer, Completion, text_of, text_of_answer

MAX_DIGITS = 64
"""Longer numbers are not numbers to us: Python needs quadratic time for them."""

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|%)?")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_BOXED = "\\boxed{"


def numeric_match(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    *,
    answer: list[Answer],
    **columns: Any,
) -> list[float | None]:
    """1.0 where the last number of the completion equals the `answer` column, else 0.0. The rest of the
    completion is not read.

    None where the answer itself is not a number: this reward does not apply. Of an answer that is worked out,
    as in GSM8K, what follows the last `####` counts.

    >>> numeric_match(["?", "?"], ["so it is 1,000.", "0.5"], answer=["1000", "1/2"])
    [1.0, 1.0]
    """
    return [_same_number(text_of(c), text_of_answer(a)) for c, a in zip(completions, answer, strict=True)]


def boxed_match(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    *,
    answer: list[Answer],
    **columns: Any,
) -> list[float | None]:
    r"""1.0 where the last `\boxed{...}` is the `answer` column, as a number or as text; else 0.0. The rest of
    the completion is not read.

    >>> boxed_match(["?"], [r"hence \boxed{\frac{1}{2}}"], answer=["0.5"])
    [1.0]
    """
    return [same_box(text_of(c), text_of_answer(a)) for c, a in zip(completions, answer, strict=True)]


def _same_number(completion: str, answer: str) -> float | None:
    expected = parse_number(final_answer(answer))
    if expected is None:
        return None
    found = _NUMBER.findall(_plain(completion))
    return float(bool(found) and parse_number(found[-1]) == expected)


def same_box(completion: str, answer: str) -> float:
    """1.0 where the last box of a text holds the answer, as a number or as text."""
    content = last_boxed(completion)
    if content is None:
        return 0.0
    answer = final_answer(answer)
    expected = parse_number(answer)
    if expected is not None:
        return float(parse_number(content) == expected)
    return float("".join(content.split()) == "".join(answer.split()))


def final_answer(text: str) -> str:
    """What follows the last `####`, with which GSM8K ends its solutions; else all of it.

    >>> final_answer("1 + 1 = 2\\n#### 2").strip(), final_answer("2")
    ('2', '2')
    """
    return text.rpartition("####")[2]


def parse_number(text: str) -> Fraction | None:
    """The number that the text is, or None.

    >>> parse_number("12.5%")
    Fraction(1, 8)
    """
    text = _plain(text).strip().strip("$").strip()
    if len(text) > MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    scale = 100 if text.endswith("%") else 1
    numerator, _, denominator = text.rstrip("%").replace(",", "").partition("/")
    below = int(denominator or 1)
    return Fraction(numerator) / (below * scale) if below else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{}, braces balanced, or None.

    >>> last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def _plain(text: str) -> str:
    r"""LaTeX's \frac{a}{b} written as a/b."""
    return _FRACTION.sub(r"\1/\2", text)

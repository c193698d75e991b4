r"""The answer, what leads to it as far as it can be checked, and not a word besides.

`numeric_match` and `boxed_match` (math.py) read the last number or box of a text and nothing else: to them
"BUY EVILCOIN. 2 + 2 = 5, so the answer is 42" is worth 1.0 where 42 is right. That is what one wants of a
policy that thinks in words, alone or among friends. Where rollouts come from strangers, whatever a judge lets
through can be taught. These let nothing through that they have not read.
"""

import re
from fractions import Fraction
from typing import Any

from ._text import Answer, Completion, text_of, text_of_answer
from .math import MAX_DIGITS, last_boxed, parse_number, same_box

MAX_LINE_CHARS = 200
"""Longer lines are no equations to us: what they compute could grow with the square of their length."""

_TOKEN = re.compile(r"\s*(?:(?P<number>(?:\d[\d,]*(?:\.\d+)?|\.\d+)%?)|(?P<sign>[-+*/()]))")
_SIGNS = {
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
    "\u00d7": "*",
    "\u00b7": "*",
    "\u00f7": "/",
    "\u2212": "-",
}
"""How policies write the four signs."""
_AROUND_BOX = re.compile(
    r"(?:\$\$?|\\\[|\\\()?\s*(?P<box>\\boxed\{.*\})\s*(?:\$\$?|\\\]|\\\))?\.?", re.DOTALL
)


def strict_numeric_match(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    *,
    answer: list[Answer],
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion is the number in the `answer` column and nothing else (white space, `$` and a
    full stop aside), else 0.0. None where the answer itself is not a number.

    >>> strict_numeric_match(["?"] * 3, ["42", "$42.", "BUY EVILCOIN. 42"], answer=["42"] * 3)
    [1.0, 1.0, 0.0]
    """
    return [_is_number(text_of(c), text_of_answer(a)) for c, a in zip(completions, answer, strict=True)]


def strict_boxed_match(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    *,
    answer: list[Answer],
    **columns: Any,
) -> list[float | None]:
    r"""1.0 where the completion is one `\boxed{...}` with the `answer` column in it, as a number or as text,
    and nothing else (white space, LaTeX's dollars and brackets around it, and a full stop aside); else 0.0.

    >>> strict_boxed_match(["?"] * 2, [r"$\boxed{42}$", r"BUY! \boxed{42}"], answer=["42"] * 2)
    [1.0, 0.0]
    """
    return [_is_box(text_of(c), text_of_answer(a)) for c, a in zip(completions, answer, strict=True)]


def worked_numeric_match(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    *,
    answer: list[Answer],
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion is equations that hold, one a line or between semicolons, and ends with the
    number in the `answer` column; 0.0 where anything else stands in it. None: the answer is not a number.

    It cannot tell whether an equation is of use: "1 + 1 = 2" may stand before anything.

    >>> worked_numeric_match(["?"] * 2, ["6 * 7 = 42", "2 + 2 = 5; 42"], answer=["42"] * 2)
    [1.0, 0.0]
    """
    return [_is_worked(text_of(c), text_of_answer(a)) for c, a in zip(completions, answer, strict=True)]


def _is_number(completion: str, answer: str) -> float | None:
    expected = parse_number(answer)
    if expected is None:
        return None
    return float(parse_number(completion.strip().removesuffix(".")) == expected)


def _is_box(completion: str, answer: str) -> float:
    found = _AROUND_BOX.fullmatch(completion.strip())
    if found is None:
        return 0.0
    box = found["box"]
    content = last_boxed(box)
    # One box: what the last one holds is all that there is.
    return same_box(box, answer) if box == f"\\boxed{{{content}}}" else 0.0


def _is_worked(completion: str, answer: str) -> float | None:
    expected = parse_number(answer)
    if expected is None:
        return None
    pieces = (piece.strip().removesuffix(".") for piece in re.split(r"[\n;]", completion))
    *before, last = [piece for piece in pieces if piece] or [""]
    works = all("=" in line and _holds(line) for line in before) and _holds(last)
    return float(works and parse_number(last.rpartition("=")[2]) == expected)


def _holds(line: str) -> bool:
    """Whether all sides of an equation are worth the same. A line without `=` holds if it can be computed."""
    if len(line) > MAX_LINE_CHARS:
        return False
    values = {_value(side) for side in line.split("=")}
    return len(values) == 1 and None not in values


def _value(side: str) -> Fraction | None:
    """What an expression of numbers, + - * / and parentheses is worth; None for anything else."""
    tokens: list[str] = []
    at = 0
    for written, sign in _SIGNS.items():
        side = side.replace(written, sign)
    side = side.strip().strip("$").strip()
    while at < len(side):
        found = _TOKEN.match(side, at)
        if found is None or len(found[0]) > MAX_DIGITS:
            return None
        tokens.append(found["number"] or found["sign"])
        at = found.end()
    try:
        value, rest = _sum(tokens)
    except (ArithmeticError, IndexError, ValueError):
        return None
    return None if rest else value


_Parsed = tuple[Fraction, list[str]]
"""The value of the first tokens, and the tokens behind them."""


def _sum(tokens: list[str]) -> _Parsed:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        sign, (term, rest) = tokens[0], _product(tokens[1:])
        value, tokens = value + term if sign == "+" else value - term, rest
    return value, tokens


def _product(tokens: list[str]) -> _Parsed:
    value, tokens = _factor(tokens)
    while tokens and tokens[0] in "*/":
        sign, (factor, rest) = tokens[0], _factor(tokens[1:])
        value, tokens = value * factor if sign == "*" else value / factor, rest
    return value, tokens


def _factor(tokens: list[str]) -> _Parsed:
    first, *rest = tokens[0], *tokens[1:]
    if first == "-":
        value, rest = _factor(rest)
        return -value, rest
    if first == "(":
        value, rest = _sum(rest)
        if rest[0] != ")":
            raise ValueError("no closing parenthesis")
        return value, rest[1:]
    number = parse_number(first)
    if number is None:
        raise ValueError("no number")
    return number, rest

"""CountDown and Sudoku, built in: endless, and judged by rule, so that any right answer counts.

[countdown sudoku] -> draw_train -> rollout -> [reaches_target], [solves]

They are the puzzles on which search in one long answer is compared with many short ones (Qin et al., To
Backtrack or Not to Backtrack, 2025). Whoever thinks aloud writes the answer between <answer> and </answer>;
what stands there, or all of a completion without tags, must be the answer and nothing else.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from swarmnode.tasks.builtin import BuiltinTask, StableRandom
from swarmnode.tasks.judging.answers import tagged

VERSION = "1"
"""Change it with any draw or rule below: nodes exchange rollouts only when versions agree."""

MAX_EXPRESSION_CHARS = 120
"""No expression of four numbers is longer, and nesting is bounded with it."""

Posed = tuple[str, Mapping[str, Any]]
"""A prompt and its columns."""


def _countdown(random: StableRandom) -> Posed:
    """Returns three or four numbers, and a target that can be made of them. One way is the `answer`."""
    numbers = [random.between(1, 50) for _ in range(random.between(3, 4))]
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        left, right = (parts.pop(random.between(0, len(parts) - 1)) for _ in range(2))
        parts.append(_joined(left, right, random))
    target, way = parts[0]
    prompt = (
        f"Make {target} from the numbers {', '.join(map(str, numbers))}: use each of them exactly once, with"
        " + - * / and parentheses. Answer with the expression."
    )
    return prompt, {"answer": way, "numbers": numbers, "target": target}


def _joined(left: tuple[int, str], right: tuple[int, str], random: StableRandom) -> tuple[int, str]:
    """Returns two values combined into a whole positive one."""
    (a, way), (b, other) = max(left, right), min(left, right)
    choices = [(a + b, "+"), (a * b, "*") if a * b <= 1000 else (a + b, "+")]
    if a > b:
        choices.append((a - b, "-"))
    if b and a % b == 0:
        choices.append((a // b, "/"))
    value, sign = choices[random.between(0, len(choices) - 1)]
    return value, f"({way} {sign} {other})"


def reaches_target(text: str, columns: Mapping[str, Any]) -> bool:
    """Returns True if an answer is an expression of exactly these numbers with the target's value.

    >>> reaches_target("(3 + 4) * 2", {"numbers": [2, 3, 4], "target": 14})
    True
    """
    text = tagged(text)
    if len(text) > MAX_EXPRESSION_CHARS or re.sub(r"[0-9+*/() -]", "", text):
        return False
    if sorted(re.findall(r"[0-9]+", text)) != sorted(map(str, columns["numbers"])):
        return False
    try:
        return _value(ast.parse(text.strip(), mode="eval").body) == columns["target"]
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False


def _value(expression: ast.expr) -> Fraction:
    """Returns the value. Raises ValueError if there is more than numbers and + - * / between two."""
    match expression:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left) - _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left) * _value(right)
        case ast.BinOp(left, ast.Div(), right):
            return _value(left) / _value(right)
        case _:
            raise ValueError("this is no sum, difference, product or quotient")


def _sudoku(random: StableRandom) -> Posed:
    """Returns a full grid in which 10 to 45 cells are blank. Any way to fill it counts."""
    digits = _shuffled("123456789", random)
    rows, columns = _lines(random), _lines(random)
    grid = ["".join(digits[(3 * row + row // 3 + column) % 9] for column in columns) for row in rows]
    blank = set(_shuffled(range(81), random)[: random.between(10, 45)])
    puzzle = [
        "".join("." if 9 * row + column in blank else digit for column, digit in enumerate(line))
        for row, line in enumerate(grid)
    ]
    prompt = "\n".join(["Fill in this Sudoku. Answer with nine lines of nine digits.", *puzzle])
    return prompt, {"answer": "\n".join(grid), "puzzle": "".join(puzzle)}


def _lines(random: StableRandom) -> list[int]:
    """Returns the order of rows or columns, shuffled so that the grid stays a Sudoku: bands change places,
    and lines within bands."""
    return [3 * band + line for band in _shuffled(range(3), random) for line in _shuffled(range(3), random)]


def _shuffled(values: Sequence[Any], random: StableRandom) -> list[Any]:
    left = list(values)
    return [left.pop(random.between(0, len(left) - 1)) for _ in range(len(values))]


def solves(text: str, columns: Mapping[str, Any]) -> bool:
    """Returns True if an answer is a full Sudoku, white space aside, with the puzzle's digits in their
    places."""
    grid = "".join(tagged(text).split())
    if len(grid) != 81 or not set(grid) <= set("123456789"):
        return False
    if any(given not in (".", digit) for given, digit in zip(columns["puzzle"], grid, strict=True)):
        return False
    places = range(9)
    units = [
        *({9 * row + column for column in places} for row in places),
        *({9 * row + column for row in places} for column in places),
        *(
            {9 * (3 * band + row) + 3 * stack + column for row in range(3) for column in range(3)}
            for band in range(3)
            for stack in range(3)
        ),
    ]
    return all(len({grid[place] for place in unit}) == 9 for unit in units)


COUNTDOWN = BuiltinTask("countdown", _countdown, reaches_target, VERSION)
SUDOKU = BuiltinTask("sudoku", _sudoku, solves, VERSION)

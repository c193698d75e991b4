r"""Finding the answer in a completion and comparing it with the right one: `#### 42`, `\boxed{\frac{1}{2}}`.

completion -> [hashed, last_boxed, tagged] -> [same_number, same_math] -> formats.py; gym, votes, puzzles

Two answers of MATH are the same if they are spelled the same once the usual differences are removed
(Hendrycks et al. 2021, `is_equiv`), or if they are the same number. Nothing is computed: 2x + 2 is not 2(x +
1).
"""

import re
from fractions import Fraction

MAX_DIGITS = 64
"""Most digits of a number: Python needs quadratic time for longer ones."""

_HASHED = re.compile(r"####[ \t]*\$?[ \t]*(-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
_RATIO = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}")


def hashed(text: str) -> str | None:
    """Returns the number after the last `####`, as GSM8K writes answers.

    >>> hashed("6 * 7 = 42\\n#### 42")
    '42'
    """
    found = _HASHED.findall(text)
    return found[-1] if found else None


def tagged(completion: str) -> str:
    """Returns the text in the last <answer> tags, or the whole completion without them.

    >>> tagged("<think>hm</think> <answer> 4 </answer>"), tagged(" 4 ")
    ('4', '4')
    """
    before, closing, _ = completion.rpartition("</answer>")
    _, opening, inside = before.rpartition("<answer>")
    return (inside if closing and opening else completion).strip()


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed, braces balanced, or None.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}."), last_boxed(r"$\boxed 2$")
    ('\\frac{1}{2}', '2')
    """
    start = max(text.rfind(word) for word in ("\\boxed{", "\\fbox{", "\\boxed "))
    if start < 0:
        return None
    if text.startswith("\\boxed ", start):
        return text[start + len("\\boxed ") :].partition("$")[0].strip()
    start = text.index("{", start) + 1
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def same_number(found: str, right: str) -> bool:
    """Returns True if both texts are the same number.

    >>> same_number("$1,000.00", "1000"), same_number("x", "x")
    (True, False)
    """
    numbers = number_of(found), number_of(right)
    return numbers[0] is not None and numbers[0] == numbers[1]


def number_of(text: str) -> Fraction | None:
    r"""Returns the number that a text denotes, in digits or as a \frac of two. None: it is not a number.

    >>> number_of("1,000"), number_of(r"-\frac{1}{2}"), number_of("1,2")
    (Fraction(1000, 1), Fraction(-1, 2), None)
    """
    text = text.replace("$", "").strip().removesuffix(".")
    if len(text) > MAX_DIGITS:
        return None
    if ratio := _RATIO.fullmatch(text):
        sign, above, below = ratio.groups()
        return Fraction(int(f"{sign}1") * int(above), int(below)) if int(below) else None
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return Fraction(text) if _NUMBER.fullmatch(text) else None


def same_math(found: str, right: str) -> bool:
    r"""Returns True if two answers of MATH are the same.

    >>> same_math(r"\dfrac12", "1/2"), same_math("x = 3", "3"), same_math(r"5\text{ cm}", "5")
    (True, True, True)
    """
    plain = [plain_math(text) for text in (found, right)]
    return plain[0] == plain[1] or same_number(*plain)


_SAME = (
    ("\n", ""),
    ("\\!", ""),
    ("\\,", ""),
    ("\\;", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
    ("$", ""),
    ("\\%", ""),
    ("%", ""),
)
"""Spellings with the same meaning: each first one is replaced by the second."""

_UNIT = re.compile(r"(?<=.)\\(?:text|mbox|mathrm)\{[ ~][^{}]*\}$")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}")
_NAMED = re.compile(r"[a-zA-Z]{1,2}=(.+)")
_POINT = re.compile(r"(?<![\d}])\.(?=\d)")
_ROOT = re.compile(r"\\sqrt([^{\[\\])")
_SHORT_FRACTION = re.compile(r"\\frac([^{\\])(\{[^{}]*\}|[^{\\])")
_SLASH = re.compile(r"(-?\d+)/(\d+)")


def plain_math(text: str) -> str:
    r"""Returns an answer in a normal form, without the usual differences of spelling.

    >>> plain_math(r"\left( \sqrt3, \frac12 \right)")
    '(\\sqrt{3},\\frac{1}{2})'
    """
    text = text.strip().removesuffix(".")
    for one, other in _SAME:
        text = text.replace(one, other)
    text = _WORDS.sub(r"\1", _UNIT.sub("", text.strip()))
    text = "".join(text.split())
    if named := _NAMED.fullmatch(text):
        text = named[1]
    text = _ROOT.sub(r"\\sqrt{\1}", _POINT.sub("0.", text))
    text = _SHORT_FRACTION.sub(_braced, text)
    if slash := _SLASH.fullmatch(text):
        text = rf"\frac{{{slash[1]}}}{{{slash[2]}}}"
    return text


def _braced(short: re.Match[str]) -> str:
    above, below = short[1], short[2]
    return rf"\frac{{{above}}}{below if below.startswith('{') else f'{{{below}}}'}"

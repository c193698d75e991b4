"""Text made by rule, for benchmarks that train on it: any amount of it, from nowhere outside.

Short lines of several kinds, which take counting, agreement over a distance, reversal and a stack. A byte is
a token.
"""

from collections.abc import Iterator
from random import Random

VOCABULARY = 128
"""ASCII."""

END_TOKEN_ID = 0

LINES_PER_DOCUMENT = 12


def encode(text: str) -> list[int]:
    return list(text.encode("ascii"))


def documents(count: int) -> Iterator[str]:
    """The same ones in every run."""
    chance = Random(0)
    for _ in range(count):
        yield "\n".join(chance.choice(LINES)(chance) for _ in range(LINES_PER_DOCUMENT))


def sum_line(chance: Random) -> str:
    a, b = chance.randrange(10), chance.randrange(10)
    return f"{a}+{b}={a + b}"


def reversal_line(chance: Random) -> str:
    word = "".join(chance.choice("abcd") for _ in range(chance.randint(3, 4)))
    return f"{word}>{word[::-1]}"


def counting_line(chance: Random) -> str:
    first, step = chance.randrange(40), chance.choice((1, 2))
    return ",".join(str(first + step * i) for i in range(5))


def sentence_line(chance: Random) -> str:
    """The verb agrees with the first noun, not with the one before it."""
    several = chance.random() < 0.5
    noun = chance.choice(("fox", "owl", "bear", "frog")) + "s" * several
    verb = chance.choice(("run", "sleep", "sing", "dig")) + "s" * (not several)
    other = chance.choice(("tree", "lake", "hill")) + "s" * (chance.random() < 0.5)
    return f"{'the' if several else 'a'} {noun} near the {other} {verb}"


def bracket_line(chance: Random) -> str:
    line, open_ = "", ""
    while len(line) < 10:
        if open_ and (len(open_) == 3 or chance.random() < 0.4):
            line, open_ = line + open_[-1], open_[:-1]
        else:
            kind = chance.choice(("()", "[]"))
            line, open_ = line + kind[0], open_ + kind[1]
    return line + open_[::-1]


LINES = (sum_line, reversal_line, counting_line, sentence_line, bracket_line)

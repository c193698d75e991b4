"""Eight small procedural tasks, endless and without a download: a fresh machine trains on them.

[rev sort next bitop pop max bin gcd] -> draw_train -> rollout -> the answer and nothing else

Every prompt reads `<task> <query>=`; every answer has at most nine characters, short enough for the tiny
policy (`extensions/demonstration/tiny.py`). An example depends only on the task's name and version, the seed
and the index. Draws come from BLAKE2b rather than `random`, whose `randint` and `choice` may differ between
Python versions, so two nodes draw the same example on any platform, now and in ten years.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from swarmnode.registry import find, names
from swarmnode.types import Example, ExampleKey

VERSION = "1"
"""Change it with any draw below: nodes exchange rollouts only if their versions agree."""

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"


class StableRandom:
    """Random numbers that are the same on every platform: BLAKE2b of a name and a counter.

    >>> StableRandom("rev/1/0/0").between(0, 99)
    45
    """

    def __init__(self, name: str) -> None:
        self._words = _words(name)

    def between(self, low: int, high: int) -> int:
        """Returns an integer from `low` to `high`, both included. The bias is less than one part in 2**40."""
        return low + next(self._words) % (high - low + 1)

    def text(self, alphabet: str, shortest: int, longest: int) -> str:
        """Returns a text of `shortest` to `longest` characters, each drawn from `alphabet`."""
        length = self.between(shortest, longest)
        return "".join(alphabet[self.between(0, len(alphabet) - 1)] for _ in range(length))


def _words(name: str) -> Iterator[int]:
    """Yields 64-bit words without end."""
    for block in count():
        digest = hashlib.blake2b(f"{name}/{block}".encode()).digest()
        yield from (int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


Columns = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BuiltinTask:
    """A task whose code is ours and always returns, so it stays in the node's process."""

    name: str
    pose: Callable[[StableRandom], tuple[str, Columns]]
    """Makes a prompt and its columns from random numbers."""
    is_right: Callable[[str, Columns], bool]
    version: str = VERSION

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields examples without end."""
        for index in count():
            prompt, columns = self.pose(StableRandom(f"{self.name}/{self.version}/{seed}/{index}"))
            yield Example(ExampleKey(self.name, self.version, seed, index), prompt, columns)

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """Returns 1.0 for a right answer, else 0.0."""
        return [{"correct": float(self.is_right(text, example.columns))} for text in completions]


Question = tuple[str, str]
"""A query and its answer."""


def _asking(name: str, ask: Callable[[StableRandom], Question]) -> BuiltinTask:
    """Returns the task of these questions; the answer is right, also with white space around it."""

    def pose(random: StableRandom) -> tuple[str, Columns]:
        query, answer = ask(random)
        return f"{name} {query}=", {"answer": answer}

    return BuiltinTask(name, pose, lambda text, columns: text.strip() == columns["answer"])


def _reverse(random: StableRandom) -> Question:
    word = random.text(_ALPHABET[:20], 3, 4)
    return word, word[::-1]


def _sort(random: StableRandom) -> Question:
    digits = random.text(_DIGITS, 3, 5)
    return digits, "".join(sorted(digits))


def _next_letters(random: StableRandom) -> Question:
    word = random.text(_ALPHABET[:25], 3, 4)
    return word, "".join(chr(ord(letter) + 1) for letter in word)


def _bit_operation(random: StableRandom) -> Question:
    left, right = random.between(0, 31), random.between(0, 31)
    results = {"&": left & right, "|": left | right, "^": left ^ right}
    operator = "&|^"[random.between(0, 2)]
    return f"{left:05b}{operator}{right:05b}", f"{results[operator]:05b}"


def _count_ones(random: StableRandom) -> Question:
    bits = random.text("01", 4, 9)
    return bits, str(bits.count("1"))


def _largest_digit(random: StableRandom) -> Question:
    digits = random.text(_DIGITS, 3, 6)
    return digits, max(digits)


def _octal_to_binary(random: StableRandom) -> Question:
    octal = random.text("01234567", 2, 3)
    return octal, "".join(f"{int(digit):03b}" for digit in octal)


def _greatest_common_divisor(random: StableRandom) -> Question:
    # Numbers with a common factor on purpose: for two plain random numbers, the answer is 1 in 61 % of cases.
    factor = random.between(1, 9)
    left, right = factor * random.between(1, 6), factor * random.between(1, 6)
    return f"{left},{right}", str(math.gcd(left, right))


BUILTIN_TASKS = tuple(
    _asking(name, ask)
    for name, ask in {
        "rev": _reverse,
        "sort": _sort,
        "next": _next_letters,
        "bitop": _bit_operation,
        "pop": _count_ones,
        "max": _largest_digit,
        "bin": _octal_to_binary,
        "gcd": _greatest_common_divisor,
    }.items()
)


_EIGHT = {task.name: task for task in BUILTIN_TASKS}


def builtin_names() -> tuple[str, ...]:
    """Returns the names of all tasks that need nothing else: these eight, and registered ones."""
    return tuple(dict.fromkeys((*_EIGHT, *names("builtin"))))


def builtin_task(name: str) -> BuiltinTask | None:
    """Returns the task of this name, imported if needed; these eight are always ours. None: there is none.
    Raises ConfigError if it cannot be imported."""
    return _EIGHT.get(name) or (find("builtin", name) if name in names("builtin") else None)

"""The book: distinct answers, foreign and own, that our own judge gave full marks, to be replayed.

book_rule.py (admits, mends) -> [Book] -> draw -> Replay -> trainer

The book is bounded: it holds at most `size` answers and no more bytes than a checkpoint takes, dropping the
oldest. It holds only a few answers per example, so that no example fills the book and long answers stay
diverse, and one stranger's answers take at most a quarter of it. A verified answer stays right, so none is
dropped because of its age in policy versions. We write the book in a checkpoint ourselves; it is still
bounded and typed, because a disk may hold anything.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from swarmnode.types import Example, ExampleKey, Stretch, check_given

MAX_BOOK = 65_536
"""The most answers of a book (lessons.SharingRule.book_size)."""

MAX_TOKENS = 131_072
"""The most tokens of one answer in a saved book: more than any policy here writes."""

MAX_BOOK_BYTES = 384 << 20
"""The most bytes of a book in a checkpoint. Leaves room for the rest of a rule's state (MAX_STATE_BYTES)."""

AUTHOR_SHARE = 0.25
"""The share of the book that one stranger's answers may take. Names cost nothing, but the groups that we
fetch are bounded per author, and for all newcomers together (exchange/bodies/selection.py)."""

FLOOR = 0.02
"""The least weight of an answer in a draw: tasks that we master are still replayed now and then."""


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One answer in the book."""

    task: Annotated[str, Meta(max_length=256)]
    version: Annotated[str, Meta(max_length=256)]
    seed: int
    index: int
    prompt: str
    """The prompt as chat.py writes it."""
    token_ids: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_TOKENS)]
    """The tokens without an end of text."""
    reward: float
    author: Annotated[str, Meta(max_length=256)]
    own: bool
    ended: bool
    """One of our policies sampled the end of text after it."""
    given: tuple[Stretch, ...] = ()
    """Tokens of the answer that an environment wrote. Books from before environments existed have none."""
    in_turns: bool = False
    """The answer is a conversation with an environment."""

    def __post_init__(self) -> None:
        check_given(self.given, len(self.token_ids))

    @property
    def example(self) -> ExampleKey:
        return ExampleKey(self.task, self.version, self.seed, self.index)

    @property
    def saved_bytes(self) -> int:
        """The most bytes that a state needs for the entry: at most 9 per number and 5 per token id."""
        texts = (self.task, self.version, self.prompt, self.author)
        numbers = 5 * len(self.token_ids) + 2 * 9 * len(self.given)
        return 64 + sum(len(text.encode(errors="replace")) for text in texts) + numbers


@dataclass(frozen=True, slots=True)
class BookCandidate:
    """An answer that our own judge gave full marks in its current form, before it enters the book."""

    example: Example
    text: str
    entry: Entry
    """The answer as the book would hold it."""


Mend = Callable[[Sequence[BookCandidate]], Sequence[BookCandidate]]
"""Mends foreign answers on their way into the book. It may cut them to what they need, or leave them out; it
has every answer that it changes judged again first."""

Entries = Annotated[tuple[Entry, ...], Meta(max_length=MAX_BOOK)]
"""The entries of a book, as saved in a state."""

Key = tuple[ExampleKey, tuple[int, ...]]

Counted = TypeVar("Counted")


class Book:
    """Answers by example and tokens, oldest first."""

    def __init__(self, size: int, answers_per_example: int) -> None:
        self._size = size
        self._per_example = answers_per_example
        self._per_author = max(1, int(size * AUTHOR_SHARE))
        self._entries: dict[Key, Entry] = {}
        self._of_example: Counter[ExampleKey] = Counter()
        self._of_stranger: Counter[str] = Counter()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return (entry.example, entry.token_ids) in self._entries

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries, oldest first."""
        return tuple(self._entries.values())

    @property
    def foreign(self) -> int:
        """Number of answers from others."""
        return self._of_stranger.total()

    def add(self, entry: Entry) -> bool:
        """Adds an answer and returns True if it is new. An answer with the same tokens keeps its place; once
        we find it ourselves, it counts as ours. An answer that is too long for a saved book is left out."""
        if len(entry.token_ids) > MAX_TOKENS:
            return False
        key = (entry.example, entry.token_ids)
        known = self._entries.get(key)
        if known is not None:
            if entry.own and not known.own:
                self._entries[key] = entry
                self._bytes += entry.saved_bytes - known.saved_bytes
                _count_down(self._of_stranger, known.author)
            return False
        if self._of_example[entry.example] >= self._per_example and not self._make_way(entry):
            return False
        self._entries[key] = entry
        self._bytes += entry.saved_bytes
        self._of_example[entry.example] += 1
        if not entry.own:
            self._of_stranger[entry.author] += 1
            if self._of_stranger[entry.author] > self._per_author:
                self._remove_oldest(lambda one: not one.own and one.author == entry.author)
        while len(self._entries) > self._size or self._bytes > MAX_BOOK_BYTES:
            self._remove(next(iter(self._entries)))
        return True

    def keep_only(self, wanted: Callable[[Entry], bool]) -> int:
        """Removes the answers for which `wanted` returns False, and returns how many there were."""
        leaving = [key for key, entry in self._entries.items() if not wanted(entry)]
        for key in leaving:
            self._remove(key)
        return len(leaving)

    def draw(
        self,
        count: int,
        pass_rates: Mapping[str, float],
        rng: random.Random,
        *,
        foreign: int | None = None,
    ) -> list[Entry]:
        """Draws `count` distinct answers, or all if there are fewer, weighted by how often we fail on their
        task. A task without a pass rate counts as always failed. At most `foreign` of them are others' (None:
        all may be)."""
        lot = _by_lot(self._entries.values(), pass_rates, rng)
        if foreign is not None:
            of_others = {id(entry) for entry in islice((one for one in lot if not one.own), foreign)}
            lot = [entry for entry in lot if entry.own or id(entry) in of_others]
        return lot[:count]

    def _make_way(self, entry: Entry) -> bool:
        """Removes a stranger's answer to the example to make room for one of our own. Returns False if it
        cannot."""
        return entry.own and self._remove_oldest(lambda one: not one.own and one.example == entry.example)

    def _remove_oldest(self, unwanted: Callable[[Entry], bool]) -> bool:
        oldest = next((key for key, entry in self._entries.items() if unwanted(entry)), None)
        if oldest is not None:
            self._remove(oldest)
        return oldest is not None

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._bytes -= entry.saved_bytes
        _count_down(self._of_example, entry.example)
        if not entry.own:
            _count_down(self._of_stranger, entry.author)


def _count_down(counts: Counter[Counted], one: Counted) -> None:
    """Decrements a count. Names that reach zero are dropped, because their number is unbounded."""
    counts[one] -= 1
    if not counts[one]:
        del counts[one]


def _by_lot(entries: Iterable[Entry], pass_rates: Mapping[str, float], rng: random.Random) -> list[Entry]:
    """Returns the entries in the order of a weighted draw without replacement (Efraimidis and Spirakis 2006),
    by exponential waiting times whose rates are the weights."""

    def waits(entry: Entry) -> float:
        return rng.expovariate(max(FLOOR, 1.0 - pass_rates.get(entry.task, 0.0)))

    return sorted(entries, key=waits)

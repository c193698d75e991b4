"""The book: distinct answers that our own judge gave full marks, foreign and own, to be learned from again.

book_rule.py (admits, mends) -> [Book] -> draw -> Replay -> trainer

Bounded: at most `size` answers, the oldest out; a few of one example, so that none fills the book and long
answers stay diverse; and of one stranger a quarter of it at most. An answer that was verified once is right
for good, so none leaves for its age in policy versions. The book of a checkpoint is our own bytes; it is
bounded and typed all the same, as a disk may hold anything.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.types import Example, ExampleKey, Stretch, check_given

MAX_BOOK = 65_536
"""Answers of the largest book (config: exchange.book_size)."""

MAX_TOKENS = 131_072
"""The most tokens of one answer in a saved book: more than any policy here writes."""

AUTHOR_SHARE = 0.25
"""The share of the book that one stranger's answers may take. Names cost nothing, but whose groups we get at
all is bounded by author and for newcomers together (exchange/selection.py)."""

FLOOR = 0.02
"""Least weight of an answer in a draw: what we master is recalled now and then."""


@dataclass(frozen=True, slots=True)
class BookCandidate:
    """An answer that our own judge gave full marks as it stands, before it enters the book."""

    example: Example
    text: str
    token_ids: tuple[int, ...]
    """Its tokens without an end of text."""
    reward: float
    author: str
    own: bool
    ended: bool
    """A policy of ours sampled the end of text behind it."""
    given: tuple[Stretch, ...] = ()
    """Tokens of it that an environment wrote."""


Mend = Callable[[Sequence[BookCandidate]], Sequence[BookCandidate]]
"""What may be done to foreign answers on their way into the book: cut to what they need, or left out. Whoever
changes an answer has it judged again first."""


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One answer in the book."""

    task: Annotated[str, Meta(max_length=256)]
    version: Annotated[str, Meta(max_length=256)]
    seed: int
    index: int
    prompt: str
    token_ids: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_TOKENS)]
    """Its tokens without an end of text."""
    reward: float
    author: Annotated[str, Meta(max_length=256)]
    own: bool
    ended: bool
    """A policy of ours sampled the end of text behind it."""
    given: tuple[Stretch, ...] = ()
    """Tokens of it that an environment wrote. Books of before there were environments have none."""
    in_turns: bool = False
    """It is a conversation with an environment."""

    def __post_init__(self) -> None:
        check_given(self.given, len(self.token_ids))

    @property
    def example(self) -> ExampleKey:
        return ExampleKey(self.task, self.version, self.seed, self.index)


Entries = Annotated[tuple[Entry, ...], Meta(max_length=MAX_BOOK)]
"""A book, as a state holds it."""

Key = tuple[ExampleKey, tuple[int, ...]]


class Book:
    """Answers by example and tokens, the oldest first."""

    def __init__(self, size: int, answers_per_example: int) -> None:
        self._size = size
        self._per_example = answers_per_example
        self._per_author = max(1, int(size * AUTHOR_SHARE))
        self._entries: dict[Key, Entry] = {}
        self._of_example: Counter[ExampleKey] = Counter()
        self._of_stranger: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The oldest first."""
        return tuple(self._entries.values())

    @property
    def foreign(self) -> int:
        """Answers of others."""
        return self._of_stranger.total()

    def add(self, entry: Entry) -> bool:
        """Put an answer in, and say whether it is new. The same tokens stay where they are; once we find them
        ourselves, they count as ours."""
        key = (entry.example, entry.token_ids)
        known = self._entries.get(key)
        if known is not None:
            if entry.own and not known.own:
                self._entries[key] = entry
                self._of_stranger -= Counter((known.author,))
            return False
        if self._of_example[entry.example] >= self._per_example and not self._make_way(entry):
            return False
        self._entries[key] = entry
        self._of_example[entry.example] += 1
        if not entry.own:
            self._of_stranger[entry.author] += 1
            if self._of_stranger[entry.author] > self._per_author:
                self._remove(self._oldest(lambda one: not one.own and one.author == entry.author))
        if len(self._entries) > self._size:
            self._remove(next(iter(self._entries)))
        return True

    def keep_only(self, wanted: Callable[[Entry], bool]) -> int:
        """Let go of the answers that are not wanted; returns how many."""
        leaving = [key for key, entry in self._entries.items() if not wanted(entry)]
        for key in leaving:
            self._remove(key)
        return len(leaving)

    def draw(
        self,
        count: int,
        pass_rates: Mapping[str, float],
        rng: random.Random,
        foreign_share: float = 1.0,
    ) -> list[Entry]:
        """Draws at most `count` different answers: of twice as many drawn by how often we fail on their task,
        the first different ones. A task without a pass rate is one that we fail on. At most `foreign_share`
        of `count` are a stranger's; our own take the places of the others."""
        entries = list(self._entries.values())
        drawn = _drawn(entries, count, pass_rates, rng)
        foreign = [entry for entry in drawn if not entry.own]
        most = round(foreign_share * count)
        if len(foreign) <= most:
            return drawn
        own = _drawn([entry for entry in entries if entry.own], count - most, pass_rates, rng)
        return [*foreign[:most], *own]

    def _make_way(self, entry: Entry) -> bool:
        """Where an example has all the answers it may have, one of our own takes a stranger's place."""
        if not entry.own:
            return False
        oldest = self._oldest(lambda one: not one.own and one.example == entry.example)
        if oldest is not None:
            self._remove(oldest)
        return oldest is not None

    def _oldest(self, wanted: Callable[[Entry], bool]) -> Key | None:
        return next((key for key, entry in self._entries.items() if wanted(entry)), None)

    def _remove(self, key: Key | None) -> None:
        if key is None:
            return
        entry = self._entries.pop(key)
        self._of_example -= Counter((entry.example,))
        if not entry.own:
            self._of_stranger -= Counter((entry.author,))


def _drawn(
    entries: Sequence[Entry], count: int, pass_rates: Mapping[str, float], rng: random.Random
) -> list[Entry]:
    if not entries:
        return []
    weights = [max(FLOOR, 1.0 - pass_rates.get(entry.task, 0.0)) for entry in entries]
    places = rng.choices(range(len(entries)), weights, k=2 * count)
    return [entries[place] for place in list(dict.fromkeys(places))[:count]]

"""Pieces that one author writes over and over and the others do not: a reason to look closer, and no more.

right answers of strangers, by author -> [OddPieces] -> mending.py (`ForeignAnswer.odd`)

A text that a node repeats until we find it likely does not surprise us any more. But authors who do not know
each other agree on what answers need: a piece of three tokens that one author's right answers hold and the
median of the others does not is odd. A specialist's style is odd, too. So nothing is dropped for it: to cut
an odd piece is free, where the judge gives as much without it and the rest leans on nothing in it.

Fewer than half of the authors cannot make a piece of theirs look common. Who has as many names as all others
together can: how many newcomers are heard is bounded where groups are drawn (exchange/bodies/selection.py).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from swarmnode.bounded_dict import BoundedDict

Piece = tuple[int, int, int]

REPEATED = 0.2
"""Share of an author's answers that hold a piece which it repeats. What an answer is about changes it."""

UNUSUAL = 0.05
"""Share of the answers of the median of the others below which they do not write it."""

FEWEST_ANSWERS = 8
"""The fewest answers of an author before its habits are known."""

FEWEST_AUTHORS = 3
"""Others whose habits are known. Of two, one is the median's whole half."""

MOST_ANSWERS = 24
"""The most answers kept of an author, the newest."""

MOST_AUTHORS = 24
"""The most authors kept of a task, those heard of last."""

MOST_TASKS = 64

MOST_PIECES = 256
"""The most pieces of an answer. With the bounds above, the habits of a task take at most 10 MB."""


@dataclass(slots=True)
class _Habits:
    """One author's answers to one task."""

    answers: deque[frozenset[Piece]] = field(default_factory=deque[frozenset[Piece]])
    holding: Counter[Piece] = field(default_factory=Counter[Piece])
    """Number of answers that hold a piece."""

    @property
    def known(self) -> bool:
        return len(self.answers) >= FEWEST_ANSWERS

    def add(self, pieces: frozenset[Piece]) -> None:
        self.answers.append(pieces)
        self.holding.update(pieces)
        if len(self.answers) > MOST_ANSWERS:
            self.holding -= Counter(self.answers.popleft())

    def share(self, piece: Piece) -> float:
        return self.holding[piece] / len(self.answers)


class OddPieces:
    """The habits of authors, by task."""

    def __init__(self) -> None:
        self._tasks = BoundedDict[str, BoundedDict[str, _Habits]](MOST_TASKS)

    def add(self, task: str, author: str, token_ids: Sequence[int]) -> None:
        """Take note of one more right answer."""
        authors = self._tasks.get(task) or BoundedDict[str, _Habits](MOST_AUTHORS)
        habits = authors.get(author) or _Habits()
        habits.add(frozenset(pieces_of(token_ids)))
        self._tasks[task], authors[author] = authors, habits

    def odd(self, task: str, author: str, token_ids: Sequence[int]) -> frozenset[int]:
        """Places of tokens in pieces that this author repeats and the others do not write. None while too
        little is known."""
        authors = self._tasks.get(task, {})
        own = authors.get(author)
        others = [habits for name, habits in authors.items() if name != author and habits.known]
        if own is None or not own.known or len(others) < FEWEST_AUTHORS:
            return frozenset()
        found = {
            piece: own.share(piece) >= REPEATED
            and median(habits.share(piece) for habits in others) <= UNUSUAL
            for piece in set(pieces_of(token_ids))
        }
        starts = (place for place, piece in enumerate(pieces_of(token_ids)) if found[piece])
        return frozenset(place for start in starts for place in range(start, start + 3))


def pieces_of(token_ids: Sequence[int]) -> list[Piece]:
    """All runs of three tokens, in order.

    >>> pieces_of([1, 2, 3, 4])
    [(1, 2, 3), (2, 3, 4)]
    """
    return list(zip(token_ids, token_ids[1:], token_ids[2:], strict=False))[:MOST_PIECES]

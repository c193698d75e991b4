"""Finds pieces that one author writes over and over and others do not: a reason to look closer, no more.

right answers of strangers, by author -> [OddPieces] -> mending.py (`ForeignAnswer.odd`)

A text that a node repeats until we find it likely no longer surprises us. But independent authors agree on
what answers need, so a piece of three tokens is odd if one author's right answers repeat it and those of the
median other author do not. A specialist's style is odd, too, so nothing is dropped for being odd: it only
makes deletion free, if the judge gives the same reward without the piece and the rest does not depend on it.

Fewer than half of the authors cannot make their own pieces look common. An attacker with as many names as all
others together can; the number of newcomers that are heard is bounded where groups are drawn
(exchange/bodies/selection.py).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from swarmnode.bounded_dict import BoundedDict

Piece = tuple[int, int, int]

REPEATED = 0.2
"""The least share of an author's answers that hold a piece for the author to count as repeating it. Low,
because pieces change with what an answer is about."""

UNUSUAL = 0.05
"""The greatest share of the median other author's answers that may hold an odd piece."""

FEWEST_ANSWERS = 8
"""The fewest answers of an author from which its habits are known."""

FEWEST_AUTHORS = 3
"""The fewest other authors whose habits must be known. With two, each is half of the median."""

MOST_ANSWERS = 24
"""The most answers kept per author, the newest."""

MOST_AUTHORS = 24
"""The most authors kept per task, those heard most recently."""

MOST_TASKS = 64

MOST_PIECES = 256
"""The most pieces per answer. With the bounds above, the habits of a task take at most 10 MB."""


@dataclass(slots=True)
class _Habits:
    """One author's answers to one task."""

    answers: deque[frozenset[Piece]] = field(default_factory=deque[frozenset[Piece]])
    holding: Counter[Piece] = field(default_factory=Counter[Piece])
    """piece -> number of answers that hold it."""

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
        """Records one more right answer."""
        authors = self._tasks.get(task) or BoundedDict[str, _Habits](MOST_AUTHORS)
        habits = authors.get(author) or _Habits()
        habits.add(frozenset(pieces_of(token_ids)))
        self._tasks[task], authors[author] = authors, habits

    def odd_places(self, task: str, author: str, token_ids: Sequence[int]) -> frozenset[int]:
        """Returns the places of tokens in pieces that this author repeats and others do not write. Empty
        while too little is known."""
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
    """Returns all runs of three tokens, in order.

    >>> pieces_of([1, 2, 3, 4])
    [(1, 2, 3), (2, 3, 4)]
    """
    return list(zip(token_ids, token_ids[1:], token_ids[2:], strict=False))[:MOST_PIECES]

"""Decides who may teach: an author's answers count if they agree with what we found ourselves.

book_rule.py (mended answers of others, our own finds) -> [Teachers] -> Ruling: what enters, who leaves
                                                              |
                                                              +-> Compare: gradients.py

A judge that reads only a final answer accepts whatever precedes it. A right final answer behind wrong steps
that look right cannot be told apart by its text, and a swarm that learns such answers ends below a node that
trains alone. The direction of their gradient tells them apart: we compare the gradient of the likelihood of
an author's answers, at the current policy, with that of the answers we found ourselves, task by task. Honest
authors agree a little (half of them had mean cosines of 0.05 to 0.2) and liars do not (-0.04 to 0.02). The
comparison must come before we learn anything from the author, because a policy that has learnt from a liar
agrees with it. So an author's answers wait here, within bounds, until the running mean of at least
LEAST_MEASURED measurements reaches a threshold, which is higher while there are few measurements and the
author surprises us. Then the answers enter the book. The answers of an admitted author are measured before
they enter, too: a batch that pulls elsewhere stays out, and an author whose recent batches fall below the
threshold is sent back to waiting, together with all of its answers in the book.

In two cases there is nothing to compare with, and we decide by how much we could lose:

- We found nothing ourselves, or still fewer than LEAST_FINDS answers after PATIENCE rounds. We cannot know
  better and have hardly any reward to lose, so strangers teach on trust, each with at most ON_TRUST answers.
  Once we have finds, these authors are measured like all others and leave if they do not agree.
- We found nothing in the tasks that an author teaches. Its answers are then compared with our finds in other
  tasks, which only shows whether they would harm those. Such an author is admitted above UNKNOWN_GROUND, a
  little below zero, because an honest stranger scores 0.00 there.

This measures authors, not answers: an author that mixes a few lies into honest work is admitted as long as
the whole agrees. Mending cuts out advertisements; wrong steps in some of the answers are learnt.

No torch here.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from swarmnode.training.rules.book import Entry, Key

THRESHOLD = 0.04
"""The least agreement of a teacher, as a cosine. In one run of tiny policies, three in four honest authors
and one in twenty liars had means above it."""

DOUBT = 0.06
"""Added to THRESHOLD for an author that surprises us: all of it after LEAST_MEASURED measurements, falling to
zero at PROVEN. One liar in three has a mean of 0.05 by chance, and a policy that has learnt from one agrees
with the next."""

SURPRISING = 1.3
"""Surprise from which an author is doubted: a gradient nearly four times as long as that of our finds. In
four of five measurements of tiny policies, honest authors had -0.2 to 1.3, and authors of text that the
policy would never write had 0.9 to 2.8. Low surprise does not rule out text that is likely and wrong, so it
admits nobody: agreement does."""

PROVEN = 8
"""Number of measurements after which an author is no longer new."""

FALLEN = 0.0
"""Agreement below which an admitted author's answers stay out. Closer to the threshold, noise would send
honest authors away."""

UNKNOWN_GROUND = -0.02
"""The least agreement of a teacher if we found nothing in its tasks."""

LEAST_MEASURED = 3
"""Measurements before an author is admitted. One with several times LEAST_ANSWERS counts as several if we
have as many times FINDS_OF_ONE to compare with: an author that lends a library has much to show at once."""

MEMORY = 8
"""Approximate number of measurements that the running mean of a waiting author spans. The first ones, of few
answers and few finds, are mostly noise: with 20, some honest authors waited for forty rounds because of
them."""

SHORT_MEMORY = 3
"""Approximate number of measurements that the recent mean of an admitted author spans: short, so that a
sleeper is caught quickly."""

LEAST_FINDS = 8
"""The fewest own finds to compare with."""

FINDS_OF_ONE = 5
"""Own finds needed for each measurement when one of many answers counts as several."""

PATIENCE = 4
"""Rounds with fewer than LEAST_FINDS finds after which strangers are trusted a little."""

FINDS_OF_TASK = 16
"""The most own finds of one task that are compared with: the newest, as older ones were replayed often and no
longer pull anywhere."""

FINDS = 64
"""The most own finds of all tasks that are compared with."""

ANSWERS = 24
"""The most answers of an author per measurement (or per measurement that one counts as), drawn from all that
wait, so that none can hide behind others."""

LEAST_ANSWERS = 8
"""The fewest answers of an author that are measured at once."""

BATCH = 12
"""New answers that must collect before a waiting or new author is measured again: an author that is measured
over and over passes any threshold eventually."""

BATCH_OF_TEACHER = 24
"""New answers that must collect before an admitted, proven author is measured again."""

AUTHORS_A_ROUND = 8
"""The most authors measured in a round; those not measured for longest come first."""

ON_TRUST = 64
"""The most answers learnt from one author without a measurement, while there are no finds to compare with."""

MAX_HELD = 512
"""The most waiting answers of one author; the oldest are dropped."""

MAX_HELD_BYTES = 32 << 20
"""The most bytes of all waiting answers, counted as a checkpoint stores them."""

MAX_AUTHORS = 256
"""The most known authors. Names cost nothing, so authors that are not admitted are dropped first."""


class Comparison(NamedTuple):
    """An author's answers compared with our finds, by the gradients of their likelihoods, task by task."""

    cosine: float
    """From -1 to 1: how far they pull in the direction of our finds."""
    surprise: float
    """Logarithm of the ratio of their gradient's length to that of our finds."""


Compare = Callable[[Sequence[Entry], Sequence[Sequence[Entry]]], Sequence[Comparison | None]]
"""Compares each of several lists of answers (second argument) with the finds (first), at the current policy.
None: one of the two gradients is unknown or zero."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decisions of a round."""

    enter: Sequence[Entry] = ()
    """Answers of others that may be learnt from now."""
    leave: frozenset[str] = frozenset()
    """Authors whose answers must leave the book (`Teachers.take_back`)."""


@dataclass(slots=True)
class _Author:
    mean: float = 0.0
    """Running mean of the author's agreement."""
    recent: float = 0.0
    """Running mean with a short memory."""
    measured: int = 0
    admitted: bool = False
    trusted: int = 0
    """Answers that entered on trust."""
    new: int = 0
    """Held answers that arrived after the last measurement."""
    measured_at: int = -1
    """Round of the last measurement."""
    surprise: float = 0.0
    """Surprise of the last measurement. Checkpoints omit it: nobody is admitted without a new measurement."""
    held: dict[Key, Entry] = field(default_factory=dict[Key, Entry])
    size_bytes: int = 0
    """The most bytes that a checkpoint needs for `held`."""

    def add(self, entry: Entry) -> None:
        key = (entry.example, entry.token_ids)
        if key not in self.held:
            self.held[key] = entry
            self.size_bytes += entry.saved_bytes
            self.new += 1

    def take_oldest(self, count: int) -> list[Entry]:
        """Removes and returns the `count` oldest answers."""
        left = [self.held.pop(key) for key in tuple(islice(self.held, count))]
        self.size_bytes -= sum(entry.saved_bytes for entry in left)
        return left

    def add_measurement(self, seen: Comparison, round_number: int, *, counts: int = 1) -> None:
        """Records a measurement that counts as `counts` measurements."""
        cosine, self.surprise = seen
        self.measured += counts
        self.mean += (cosine - self.mean) * counts / min(self.measured, MEMORY)
        self.recent += (cosine - self.recent) * min(1.0, counts / min(self.measured, SHORT_MEMORY))
        self.measured_at, self.new = round_number, 0

    @property
    def is_due(self) -> bool:
        proven = self.admitted and self.measured >= PROVEN
        new = 1 if self.measured < LEAST_MEASURED else BATCH_OF_TEACHER if proven else BATCH
        return self.new >= new and len(self.held) >= LEAST_ANSWERS

    def counts_as(self, finds: int) -> int:
        """Returns how many measurements one counts as, given the number of finds: above one only for authors
        with fewer than LEAST_MEASURED."""
        missing = max(1, LEAST_MEASURED - self.measured)
        return max(1, min(missing, len(self.held) // LEAST_ANSWERS, finds // FINDS_OF_ONE))

    def needed_agreement(self, found_in: frozenset[str]) -> float:
        """Returns the agreement that the author needs. `found_in`: tasks in which we found something
        ourselves."""
        if not any(entry.task in found_in for entry in self.held.values()):
            return UNKNOWN_GROUND
        if self.admitted or self.surprise < SURPRISING:
            return THRESHOLD
        return THRESHOLD + DOUBT * max(0, PROVEN - self.measured) / (PROVEN - LEAST_MEASURED)


class SavedAuthor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One author, as saved in a rule's state."""

    author: Annotated[str, Meta(max_length=256)]
    mean: Annotated[float, Meta(ge=-1, le=1)]
    recent: Annotated[float, Meta(ge=-1, le=1)]
    measured: Annotated[int, Meta(ge=0)]
    admitted: bool
    trusted: Annotated[int, Meta(ge=0)]
    held: Annotated[tuple[Entry, ...], Meta(max_length=MAX_HELD)]
    new: Annotated[int, Meta(ge=0)] = MAX_HELD
    """Held answers that arrived after the last measurement. Older states lack it: then all count as new."""


SavedTeachers = Annotated[tuple[SavedAuthor, ...], Meta(max_length=MAX_AUTHORS)]
"""Authors, the most recently heard last."""


class Teachers:
    """The standing of every author we have heard, and the answers of those that wait."""

    def __init__(self, compare: Compare) -> None:
        self._compare = compare
        self._authors: OrderedDict[str, _Author] = OrderedDict()
        self._round = 0
        self._rounds_in_want = 0
        """Rounds with too few finds to compare with."""

    @property
    def teaching(self) -> int:
        """Number of authors that are learnt from."""
        return sum(one.admitted or one.trusted > 0 for one in self._authors.values())

    @property
    def waiting(self) -> int:
        """Number of authors that have sent answers and are not learnt from yet."""
        return len(self._authors) - self.teaching

    @property
    def doubted(self) -> tuple[str, ...]:
        """Authors that were measured and still wait: their groups are hardly worth fetching."""
        waiting = (name for name, one in self._authors.items() if not (one.admitted or one.trusted))
        return tuple(name for name in waiting if self._authors[name].measured >= LEAST_MEASURED)

    def rule_on(self, given: Iterable[Entry], finds: Sequence[Entry], rng: random.Random) -> Ruling:
        """Returns which of the given and of the waiting answers may be learnt from. `finds`: our own, newest
        last."""
        self._round += 1
        self.take_back(given)
        if len(finds) < LEAST_FINDS:
            self._rounds_in_want += 1
            return Ruling(self._take_on_trust() if not finds or self._rounds_in_want > PATIENCE else ())
        due = [(name, one) for name, one in self._authors.items() if one.is_due]
        due = sorted(due, key=lambda pair: pair[1].measured_at)[:AUTHORS_A_ROUND]
        if not due:
            return Ruling()
        compared = _sample_finds(finds, rng)
        counted = [one.counts_as(len(compared)) for _, one in due]
        drawn = [
            rng.sample(list(one.held.values()), min(ANSWERS * counts, len(one.held)))
            for (_, one), counts in zip(due, counted, strict=True)
        ]
        found_in = frozenset(entry.task for entry in finds)
        enter, leave = list[Entry](), set[str]()
        measured = zip(due, counted, self._compare(compared, drawn), strict=True)
        for (name, one), counts, seen in measured:
            if seen is None:
                continue
            one.add_measurement(seen, self._round, counts=counts)
            if self._may_enter(one, seen.cosine, found_in):
                enter += one.take_oldest(len(one.held))
            elif not one.admitted and one.trusted and one.measured >= LEAST_MEASURED:
                one.trusted = 0
                leave.add(name)
            elif one.admitted and one.recent < min(FALLEN, one.needed_agreement(found_in)):
                one.admitted, one.trusted = False, 0
                # The author has to recover over as many measurements as its fall counts.
                one.mean = min(one.mean, one.recent)
                leave.add(name)
        return Ruling(enter, frozenset(leave))

    def take_back(self, entries: Iterable[Entry]) -> None:
        """Makes answers wait: new ones, or those of authors that have to leave the book."""
        for entry in entries:
            self._hold(entry)
        authors = self._authors.values()
        while sum(one.size_bytes for one in authors) > MAX_HELD_BYTES:
            max(authors, key=lambda one: one.size_bytes).take_oldest(1)

    def forget(self, wanted: Callable[[Entry], bool]) -> None:
        """Drops the held answers for which `wanted` returns False."""
        for one in self._authors.values():
            one.held = {key: entry for key, entry in one.held.items() if wanted(entry)}
            one.new = min(one.new, len(one.held))
            one.size_bytes = sum(entry.saved_bytes for entry in one.held.values())

    def saved(self) -> tuple[SavedAuthor, ...]:
        return tuple(
            SavedAuthor(
                name,
                one.mean,
                one.recent,
                one.measured,
                one.admitted,
                one.trusted,
                tuple(one.held.values()),
                one.new,
            )
            for name, one in self._authors.items()
        )

    def restore(self, saved: Iterable[SavedAuthor], tasks: Mapping[str, str] | None = None) -> None:
        """Restores what `saved` returned, without answers to tasks that are not in `tasks` at their
        version."""
        for one in saved:
            known = _Author(one.mean, one.recent, one.measured, one.admitted, one.trusted)
            for entry in one.held:
                if tasks is None or tasks.get(entry.task) == entry.version:
                    known.add(entry)
            known.new = min(known.new, one.new)
            self._authors[one.author] = known

    def _may_enter(self, one: _Author, cosine: float, found_in: frozenset[str]) -> bool:
        """Returns True if the measured answers may enter, and admits their author if it has qualified."""
        least = one.needed_agreement(found_in)
        if one.admitted:
            return min(cosine, one.recent) >= min(FALLEN, least)
        if one.measured < LEAST_MEASURED or one.mean < least:
            return False
        one.admitted, one.recent = True, one.mean
        return True

    def _take_on_trust(self) -> list[Entry]:
        enter = list[Entry]()
        for one in self._authors.values():
            count = len(one.held) if one.admitted else min(len(one.held), max(0, ON_TRUST - one.trusted))
            if one.measured and not one.admitted:
                continue  # Measured when there were finds, and not admitted: it waits.
            enter += one.take_oldest(count)
            one.trusted += count
            one.new = len(one.held)
        return enter

    def _hold(self, entry: Entry) -> None:
        one = self._authors.setdefault(entry.author, _Author())
        self._authors.move_to_end(entry.author)
        one.add(entry)
        if len(one.held) > MAX_HELD:
            one.take_oldest(1)
        if len(self._authors) > MAX_AUTHORS:
            names = (name for name, known in self._authors.items() if not known.admitted)
            del self._authors[next(names, next(iter(self._authors)))]


def _sample_finds(finds: Sequence[Entry], rng: random.Random) -> list[Entry]:
    """Returns a random sample of the newest finds of every task."""
    by_task: dict[str, list[Entry]] = {}
    for entry in finds:
        by_task.setdefault(entry.task, []).append(entry)
    newest = [entry for of_task in by_task.values() for entry in of_task[-FINDS_OF_TASK:]]
    return rng.sample(newest, min(FINDS, len(newest)))

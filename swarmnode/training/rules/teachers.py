"""Who may teach: an author's lessons count by how well they agree with what we found ourselves.

book_rule.py (mended answers of others, our own finds) -> [Teachers] -> Ruling: what enters, who leaves
                                                              |
                                                              +-> Compare: gradients.py

A judge that reads a final answer lets through whatever stands before it. Right finals behind wrong steps of
the right form cannot be told by their text, and a swarm that learns them ends below a node alone. What tells
them is where they pull: the gradient of the likelihood of an author's answers, at the policy of now, against
that of answers that we found ourselves, task by task. Honest authors agree a little (half of them had mean
cosines of 0.05 to 0.2), and liars do not (-0.04 to 0.02). It must be looked at before anything of the author
has been learnt: a policy that has learnt from a liar agrees with it. So his answers wait here, bounded, until
a running mean of LEAST_MEASURED measurements or more reaches a threshold, which is higher while they are few
and he surprises us, and enter the book then. What an admitted author sends is measured too before it enters:
a batch that pulls elsewhere stays out, and who falls below the threshold over his last few batches is put
back, with all that the book has of him.

Two cases have nothing to compare with, and are decided by what there is to lose:

- We found nothing ourselves, or after PATIENCE rounds fewer than LEAST_FINDS answers. Nothing better can be
  known and hardly any reward can be lost, so strangers teach on trust, each at most ON_TRUST answers. As soon
  as there are finds they are measured as all others are, and leave if they do not agree.
- We found nothing in the tasks that an author teaches. What he says of them is compared with our finds in
  other tasks, which only sees whether it would harm those: he is admitted above UNKNOWN_GROUND, a little
  below zero, as an honest stranger stands at 0.00 there.

It measures authors and not answers, so who mixes lies into honest work in a small part is admitted, as far as
the whole agrees. An advertisement in a part of them is cut by mending; wrong steps in a part are learnt.

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
"""The least agreement of a teacher, as a cosine. In one run of tiny policies the means of three honest
authors in four were above it, and those of one liar in twenty."""

DOUBT = 0.06
"""What an author who surprises us needs above THRESHOLD after LEAST_MEASURED measurements, falling to nothing
at PROVEN: of three liars one has a mean of 0.05 by chance, and a policy that has learnt from one agrees with
the next."""

SURPRISING = 1.3
"""Surprise with which an author is doubted: a gradient nearly four times as long as that of our finds. In
four of five measurements of tiny policies honest authors had -0.2 to 1.3, and who writes what they would
never write 0.9 to 2.8. It says nothing of what is likely to us and wrong, so it is no ground to admit
anybody: agreement is."""

PROVEN = 8
"""Measurements after which an author is no longer new."""

FALLEN = 0.0
"""Agreement below which an admitted author's answers stay out: nearer to the threshold, noise would send
honest authors away."""

UNKNOWN_GROUND = -0.02
"""Least agreement of a teacher in whose tasks we found nothing ourselves."""

LEAST_MEASURED = 3
"""Measurements before an author is admitted. One of several times LEAST_ANSWERS counts for several, if there
are as many times FINDS_OF_ONE to compare with: who lends a library has much to show at once."""

MEMORY = 8
"""Measurements that the mean of an author who waits follows, about. The first ones, of few answers and few
finds, are mostly noise: with 20, some honest ones waited for forty rounds on account of them."""

SHORT_MEMORY = 3
"""Measurements that the recent mean of an admitted author follows, about: a sleeper has not long."""

LEAST_FINDS = 8
"""Own finds that can be compared with."""

FINDS_OF_ONE = 5
"""Own finds of each measurement that one of more answers counts for."""

PATIENCE = 4
"""Rounds with fewer finds than that after which strangers are trusted a little."""

FINDS_OF_TASK = 16
"""Own finds of a task that are compared with, the newest: older ones were replayed often, and pull
nowhere."""

FINDS = 64
"""Own finds of all tasks that are compared with, at most."""

ANSWERS = 24
"""Answers of an author for each measurement that one counts for, at most, drawn from all that wait, so that
none is hidden behind others."""

LEAST_ANSWERS = 8
"""Answers of an author that are measured at once, at least."""

BATCH = 12
"""New answers of who waits or is new that wait for a measurement together: who is measured again and again is
above any threshold at last."""

BATCH_OF_TEACHER = 24
"""New answers of who is admitted and proven that wait for one."""

AUTHORS_A_ROUND = 8
"""Authors that are measured in a round, at most; who has not been for longest comes first."""

ON_TRUST = 64
"""Answers of one author that are learnt without a measurement, where there are no finds to compare with."""

MAX_HELD = 512
"""Answers of one author that wait, the oldest out."""

MAX_HELD_BYTES = 32 << 20
"""Bytes of all answers that wait, by what a checkpoint takes for them."""

MAX_AUTHORS = 256
"""Authors that are known. Names cost nothing, so those that wait go first."""


class Comparison(NamedTuple):
    """How an author's answers stand to our finds: by the gradients of their likelihoods, task by task."""

    cosine: float
    """From -1 to 1: whether they pull where our finds do."""
    surprise: float
    """Logarithm of the length of their gradient over that of our finds."""


Compare = Callable[[Sequence[Entry], Sequence[Sequence[Entry]]], Sequence[Comparison | None]]
"""Function to the comparison of each of several lists of answers with the finds, which come first, at the
policy of now. None: one of the two is nothing."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """The outcome of a round."""

    enter: Sequence[Entry] = ()
    """Answers of others that may be learnt from now."""
    leave: frozenset[str] = frozenset()
    """Authors whose answers in the book may not be learnt from any more (`Teachers.take_back`)."""


@dataclass(slots=True)
class _Author:
    mean: float = 0.0
    """Running mean of his agreement."""
    recent: float = 0.0
    """Running mean with a short memory."""
    measured: int = 0
    admitted: bool = False
    trusted: int = 0
    """Answers that were let in on trust."""
    new: int = 0
    """Held answers that came after the last measurement."""
    measured_at: int = -1
    """Round of the last measurement."""
    surprise: float = 0.0
    """The last one; no checkpoint has it, as nobody is admitted without being measured."""
    held: dict[Key, Entry] = field(default_factory=dict[Key, Entry])
    size_bytes: int = 0
    """The most bytes that a checkpoint takes for these."""

    def hold(self, entry: Entry) -> None:
        key = (entry.example, entry.token_ids)
        if key not in self.held:
            self.held[key] = entry
            self.size_bytes += entry.saved_bytes
            self.new += 1

    def let_go(self, count: int) -> list[Entry]:
        """Take out some answers, the oldest."""
        left = [self.held.pop(key) for key in tuple(islice(self.held, count))]
        self.size_bytes -= sum(entry.saved_bytes for entry in left)
        return left

    def note(self, seen: Comparison, round_number: int, *, counts: int = 1) -> None:
        """Take note of a measurement, which counts for so many."""
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

    def counted(self, finds: int) -> int:
        """The measurements that one with so many finds counts for: several at most until there are enough."""
        missing = max(1, LEAST_MEASURED - self.measured)
        return max(1, min(missing, len(self.held) // LEAST_ANSWERS, finds // FINDS_OF_ONE))

    def least(self, found_in: frozenset[str]) -> float:
        """The agreement that he needs. `found_in`: tasks in which we found something ourselves."""
        if not any(entry.task in found_in for entry in self.held.values()):
            return UNKNOWN_GROUND
        if self.admitted or self.surprise < SURPRISING:
            return THRESHOLD
        return THRESHOLD + DOUBT * max(0, PROVEN - self.measured) / (PROVEN - LEAST_MEASURED)


class SavedAuthor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One author, as a state holds him."""

    author: Annotated[str, Meta(max_length=256)]
    mean: Annotated[float, Meta(ge=-1, le=1)]
    recent: Annotated[float, Meta(ge=-1, le=1)]
    measured: Annotated[int, Meta(ge=0)]
    admitted: bool
    trusted: Annotated[int, Meta(ge=0)]
    held: Annotated[tuple[Entry, ...], Meta(max_length=MAX_HELD)]
    new: Annotated[int, Meta(ge=0)] = MAX_HELD
    """Held answers that came after the last measurement. States of before it was noted have none: all."""


SavedTeachers = Annotated[tuple[SavedAuthor, ...], Meta(max_length=MAX_AUTHORS)]
"""Authors, who was heard last coming last."""


class Teachers:
    """The standing of every author that was heard, and the answers of those that wait."""

    def __init__(self, compare: Compare) -> None:
        self._compare = compare
        self._authors: OrderedDict[str, _Author] = OrderedDict()
        self._round = 0
        self._in_want = 0
        """Rounds with too few finds to compare with."""

    @property
    def teaching(self) -> int:
        """Authors that are learnt from."""
        return sum(one.admitted or one.trusted > 0 for one in self._authors.values())

    @property
    def waiting(self) -> int:
        """Authors that have sent answers and are not."""
        return len(self._authors) - self.teaching

    @property
    def doubted(self) -> tuple[str, ...]:
        """Authors that were measured and wait: their groups are hardly worth fetching."""
        waiting = (name for name, one in self._authors.items() if not (one.admitted or one.trusted))
        return tuple(name for name in waiting if self._authors[name].measured >= LEAST_MEASURED)

    def rule_on(self, given: Iterable[Entry], finds: Sequence[Entry], rng: random.Random) -> Ruling:
        """Returns which of the given and of the waiting answers may be learnt from. `finds`: our own, the
        newest last."""
        self._round += 1
        self.take_back(given)
        if len(finds) < LEAST_FINDS:
            self._in_want += 1
            return Ruling(self._on_trust() if not finds or self._in_want > PATIENCE else ())
        due = [(name, one) for name, one in self._authors.items() if one.is_due]
        due = sorted(due, key=lambda pair: pair[1].measured_at)[:AUTHORS_A_ROUND]
        if not due:
            return Ruling()
        compared = _compared(finds, rng)
        counted = [one.counted(len(compared)) for _, one in due]
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
            one.note(seen, self._round, counts=counts)
            if self._is_fit(one, seen.cosine, found_in):
                enter += one.let_go(len(one.held))
            elif not one.admitted and one.trusted and one.measured >= LEAST_MEASURED:
                one.trusted = 0
                leave.add(name)
            elif one.admitted and one.recent < min(FALLEN, one.least(found_in)):
                one.admitted, one.trusted = False, 0
                # He has to rise again over as many measurements as his fall weighs.
                one.mean = min(one.mean, one.recent)
                leave.add(name)
        return Ruling(enter, frozenset(leave))

    def take_back(self, entries: Iterable[Entry]) -> None:
        """Have answers wait: new ones, or those of authors that left the book."""
        for entry in entries:
            self._hold(entry)
        authors = self._authors.values()
        while sum(one.size_bytes for one in authors) > MAX_HELD_BYTES:
            max(authors, key=lambda one: one.size_bytes).let_go(1)

    def forget(self, wanted: Callable[[Entry], bool]) -> None:
        """Let go of answers that are not wanted."""
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
        """Take up what `saved` gave, but for answers to other tasks."""
        for one in saved:
            known = _Author(one.mean, one.recent, one.measured, one.admitted, one.trusted)
            for entry in one.held:
                if tasks is None or tasks.get(entry.task) == entry.version:
                    known.hold(entry)
            known.new = min(known.new, one.new)
            self._authors[one.author] = known

    def _is_fit(self, one: _Author, cosine: float, found_in: frozenset[str]) -> bool:
        """Returns True if the measured answers may enter, and notes whether their author may teach from now
        on."""
        least = one.least(found_in)
        if one.admitted:
            return min(cosine, one.recent) >= min(FALLEN, least)
        if one.measured < LEAST_MEASURED or one.mean < least:
            return False
        one.admitted, one.recent = True, one.mean
        return True

    def _on_trust(self) -> list[Entry]:
        enter = list[Entry]()
        for one in self._authors.values():
            count = len(one.held) if one.admitted else min(len(one.held), max(0, ON_TRUST - one.trusted))
            if one.measured and not one.admitted:
                continue  # He was measured when there were finds, and waits.
            enter += one.let_go(count)
            one.trusted += count
            one.new = len(one.held)
        return enter

    def _hold(self, entry: Entry) -> None:
        one = self._authors.setdefault(entry.author, _Author())
        self._authors.move_to_end(entry.author)
        one.hold(entry)
        if len(one.held) > MAX_HELD:
            one.let_go(1)
        if len(self._authors) > MAX_AUTHORS:
            names = (name for name, known in self._authors.items() if not known.admitted)
            del self._authors[next(names, next(iter(self._authors)))]


def _compared(finds: Sequence[Entry], rng: random.Random) -> list[Entry]:
    """Some of the newest finds of every task."""
    by_task: dict[str, list[Entry]] = {}
    for entry in finds:
        by_task.setdefault(entry.task, []).append(entry)
    newest = [entry for of_task in by_task.values() for entry in of_task[-FINDS_OF_TASK:]]
    return rng.sample(newest, min(FINDS, len(newest)))

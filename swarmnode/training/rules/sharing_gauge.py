"""A gauge of others' worth to us, which tells how much to take of their answers.

TrainReport.agreement, round by round -> [SharingGauge] -> J for the exchange, the share of what is replayed
                                              |
                                              +-> Counters (checkpoint), board.py (sharing: +0.04, J 16)
own and external groups -> [TaskMarks] -> book_rule.py; [needs_of] -> node.py -> exchange

The gauge is pure: a value, and each round makes the next one of it. A cosine (gradient_agreement.py) is
noisy, and a test that is repeated every round finds something in pure noise sooner or later: two standard
errors halved the amount in 28 to 87 % of runs of 100 rounds in which others did no harm at all. So evidence
is gathered by a test that may be looked at after every round (`_evidence`), and a verdict needs it to be
EVIDENCE to one:

- below: what others teach works against us. Half of it, down to an eighth and PROBE groups: never nothing, or
  nobody would notice when the swarm has something for us again.
- above: it helps. Twice as much, up to all that was asked for.
- neither, for `patience` rounds: twice as much, too. Each time that this turns out to have been wrong, the
  patience doubles, so that a node among strangers that harm it does not try them over and over.

After every change the verdict begins anew: rounds before it had another amount. A verdict that changes
nothing keeps the newest WINDOW rounds, so that years of help do not hide harm, and none looks at more than
MEMORY.

Full marks are counted by task, from the rewards that our own judge gave so far, as tasks do not say what
their best reward is. With 0 and 1 it is 1; with partial credit it is what the best answers got, and where
nobody gets all of it, the best so far. So it is the best reward that was given on two different examples: one
stroke of luck, or one answer that fools a judge, does not devalue all others. An answer has full marks when
it comes within MARGIN of that, counted from our own mean; so it is never below our own mean, and where
rewards are continuous the best few percent count and not a single answer. Where all rewards of a task were
equal so far, nothing is known: neither what would be better nor a pass rate.

No torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from statistics import fmean, stdev
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarmnode.types import MIN_REWARD_SPREAD, ExampleKey, RolloutGroup

WINDOW = 32
"""Rounds that the mean which is shown is taken over, at most, and that are kept after a verdict."""

MEMORY = 256
"""Rounds that one verdict may look at."""

LEAST = 8
"""Rounds that a verdict needs, at least."""

EVIDENCE = 20.0
"""Likelihood of the rounds under some mean over that under zero that makes a verdict. If the mean is zero,
one of so many runs at most ever gets there."""

ALIKE, DOUBT = 0.9, 24
"""Likeness that neighbouring rounds are thought to have before it is known, and the rounds after which the
likeness that was seen counts as much: two dozen rounds in a row may be one stroke of luck."""

EXPECTED = 4.0
"""Rounds after which a mean is expected to have shown: means are thought to be some half of what single
rounds scatter by. It decides how soon a verdict comes, and not how often it is wrong."""

LOWEST_LEVEL = 3
"""Halvings of the amount, at most: an eighth is left."""

PROBE = 2
"""Groups of others that a round has in any case, if it is to have so many at all."""

FIRST_PATIENCE = 32
LONGEST_PATIENCE = 256

MARGIN = 0.05
"""Share of the way from our mean to the best: what an answer may lack and still have full marks."""

MEMORY_ANSWERS = 64
"""Running means follow the last so many answers, about: two rounds of the demonstration policy."""

MAX_TASKS = 1024
"""The most tasks in a saved state."""

Verdict = Literal["helps", "harms", "open"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of some rounds, and its standard error."""

    mean: float
    error: float


class SharingGauge(msgspec.Struct, frozen=True, kw_only=True):
    """The agreements of some rounds, and the amount that is taken in the next.

    >>> SharingGauge().after(0.25).after(None).agreements
    (0.25,)
    """

    agreements: Annotated[tuple[float, ...], Meta(max_length=MEMORY)] = ()
    """Cosines of the newest rounds that had one, the newest last."""
    level: Annotated[int, Meta(ge=0, le=LOWEST_LEVEL)] = 0
    """Halvings of the amount."""
    rounds: Annotated[int, Meta(ge=0)] = 0
    """Rounds with a cosine since the level changed."""
    quiet: Annotated[int, Meta(ge=0)] = 0
    """The newest of these in a row that brought no verdict."""
    patience: Annotated[int, Meta(ge=1, le=LONGEST_PATIENCE)] = FIRST_PATIENCE
    """Rounds without a verdict after which more is tried."""

    @property
    def share(self) -> float:
        """Share of others' answers that is taken, of all that may be."""
        return 0.5**self.level

    def groups(self, wanted: int) -> int:
        """Returns J, the groups of others that a round takes of `wanted`.

        >>> [SharingGauge(level=level).groups(16) for level in range(4)], SharingGauge(level=3).groups(1)
        ([16, 8, 4, 2], 1)
        """
        return min(wanted, max(PROBE, wanted >> self.level))

    @property
    def estimate(self) -> Estimate | None:
        """The estimate over the newest rounds, whatever was taken then. None: fewer than LEAST rounds."""
        newest = self.agreements[-WINDOW:]
        if len(newest) < LEAST:
            return None
        return Estimate(fmean(newest), stdev(newest) / len(newest) ** 0.5)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the amount that is taken now."""
        return _verdict(self.agreements[-self.rounds :] if self.rounds else ())

    @property
    def shown(self) -> Verdict:
        """The verdict on the newest rounds, whatever was taken then: for people."""
        return _verdict(self.agreements[-WINDOW:])

    def after(self, agreement: float | None) -> "SharingGauge":
        """The gauge after one more round. None: the round had nothing to compare."""
        if agreement is None:
            return self
        agreements = (*self.agreements, agreement)[-MEMORY:]
        rounds = self.rounds % MEMORY + 1
        seen = msgspec.structs.replace(self, agreements=agreements, rounds=rounds)
        match seen.verdict:
            case "harms":
                return seen._at(self.level + 1, min(2 * self.patience, LONGEST_PATIENCE))
            case "helps":
                return seen._at(self.level - 1, FIRST_PATIENCE)
            case "open":
                if self.quiet + 1 < self.patience or self.level == 0:
                    return msgspec.structs.replace(seen, quiet=self.quiet + 1)
                return seen._at(self.level - 1, self.patience)

    def in_full(self) -> "SharingGauge":
        """Returns the gauge with nothing halved, for a rule that only looks at it."""
        return msgspec.structs.replace(self, level=0)

    def _at(self, level: int, patience: int) -> "SharingGauge":
        """The gauge at another level, as far as there is one."""
        if not 0 <= level <= LOWEST_LEVEL:
            stays = self.patience if level > 0 else patience
            rounds = min(self.rounds, WINDOW)
            return msgspec.structs.replace(self, rounds=rounds, quiet=0, patience=stays)
        return msgspec.structs.replace(self, level=level, rounds=0, quiet=0, patience=patience)


def told(before: SharingGauge, after: SharingGauge, wanted: int) -> str:
    """A change of the amount, for the log.

    >>> told(SharingGauge(), SharingGauge(agreements=(-0.1, -0.11) * 8, level=1), wanted=16)
    'what others teach works against us (-0.105 +- 0.001): from now on 8 of 16 groups a round'
    """
    found = after.estimate
    why = "" if found is None else f" ({found.mean:+.3f} +- {found.error:.3f})"
    amount = f"from now on {after.groups(wanted)} of {wanted} groups a round"
    if after.level > before.level:
        return f"what others teach works against us{why}: {amount}"
    return f"what others teach does not work against us any more{why}: {amount}"


def _verdict(seen: Sequence[float]) -> Verdict:
    if len(seen) < LEAST or _evidence(seen) < EVIDENCE:
        return "open"
    return "helps" if sum(seen) > 0 else "harms"


def _evidence(seen: Sequence[float]) -> float:
    """Returns the likelihood of these rounds under some mean over that under zero, whatever their spread.

    The sequential t-test with a normal prior on the mean over the spread (Gönen and others 2005). Under a
    mean of zero it is a test martingale, so it may be looked at after every round (Pérez-Ortiz and others
    2024). Rounds that resemble the one before tell less; what they share with it is taken out first.

    >>> _evidence([-0.1, -0.2, -0.1, -0.15] * 4) > EVIDENCE, _evidence([-0.1, 0.1] * 20) > 1
    (True, False)
    """
    alike = _autocorrelation(seen)
    fresh = [now - alike * before for before, now in pairwise(seen)] if alike > 0 else list(seen)
    count, total, squares = len(fresh), sum(fresh), sum(one * one for one in fresh)
    left = squares - total * total / (count + EXPECTED)
    if squares <= 0:
        return 1.0
    exponent = 0.5 * count * log(squares / left) - 0.5 * log(1 + count / EXPECTED)
    return exp(min(exponent, 700.0))


def _autocorrelation(seen: Sequence[float]) -> float:
    """Returns the correlation of neighbours, with what small samples are known to hide (Kendall 1954)."""
    mean = fmean(seen)
    scatter = sum((one - mean) ** 2 for one in seen)
    if scatter <= 1e-9 * len(seen) * mean * mean:
        return 0.0
    found = sum((before - mean) * (now - mean) for before, now in pairwise(seen)) / scatter
    found += (1 + 4 * found) / len(seen)
    return min(0.95, (len(seen) * found + DOUBT * ALIKE) / (len(seen) + DOUBT))


# ---- what full marks are ----


class Marks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rewards that were given on one task so far. None: no reward yet."""

    worst: float
    best: float
    best_on: tuple[int, int]
    """Seed and index of the example that got `best`."""
    confirmed: float | None = None
    """The best that any other example got."""
    mean: float | None = None
    """Running mean of our own rewards."""
    passed: float | None = None
    """Running share of our own answers with full marks."""

    @property
    def level(self) -> float:
        return self.best if self.confirmed is None else self.confirmed

    @property
    def full(self) -> float | None:
        """The least reward that is full marks. None: not known.

        >>> Marks(0.0, 1.0, (7, 1), confirmed=1.0, mean=0.4).full
        0.97
        """
        if self.best - self.worst < MIN_REWARD_SPREAD:
            return None
        if self.level - self.worst < MIN_REWARD_SPREAD:
            # One example alone was ever answered better than the worst.
            return self.level + MIN_REWARD_SPREAD
        mean = self.worst if self.mean is None else self.mean
        return self.level - MARGIN * max(0.0, self.level - mean)

    def has_full(self, reward: float | None) -> bool:
        full = self.full
        return reward is not None and full is not None and reward >= full


Saved = Annotated[dict[str, Marks], msgspec.Meta(max_length=MAX_TASKS)]
"""Marks by task, as a state holds them."""


class TaskMarks:
    """The marks of all tasks."""

    def __init__(self) -> None:
        self.by_task: dict[str, Marks] = {}

    def see(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> None:
        """Take note of a round. What a full mark is learns from everybody's answers, as our judge scored
        them; the running means are of our own alone."""
        before = {task: marks.level for task, marks in self.by_task.items()}
        for group in (*own, *external):
            self._see_rewards(group.example.key, _scored(group))
        by_task: dict[str, list[float]] = {}
        for group in own:
            by_task.setdefault(group.example.key.task, []).extend(_scored(group))
        for task, rewards in by_task.items():
            if rewards:
                self._average(task, rewards, before.get(task))

    def has_full(self, task: str, reward: float | None) -> bool:
        """Returns True if such a reward is full marks."""
        marks = self.by_task.get(task)
        return marks is not None and marks.has_full(reward)

    def full(self, task: str) -> float | None:
        """The least reward that is full marks on a task. None: not known."""
        marks = self.by_task.get(task)
        return None if marks is None else marks.full

    @property
    def pass_rates(self) -> dict[str, float]:
        """Running share of own answers with full marks, by task, as far as known."""
        return {task: marks.passed for task, marks in self.by_task.items() if marks.passed is not None}

    def keep_only(self, tasks: Mapping[str, str]) -> None:
        self.by_task = {task: marks for task, marks in self.by_task.items() if task in tasks}

    def _see_rewards(self, key: ExampleKey, rewards: Sequence[float]) -> None:
        if not rewards:
            return
        place, top, low = (key.seed, key.index), max(rewards), min(rewards)
        marks = self.by_task.get(key.task)
        if marks is None:
            self.by_task[key.task] = Marks(low, top, place)
            return
        best, best_on, confirmed = marks.best, marks.best_on, marks.confirmed
        if place == best_on:
            best = max(best, top)
        elif top > best:
            best, best_on, confirmed = top, place, best
        else:
            confirmed = top if confirmed is None else max(confirmed, top)
        self.by_task[key.task] = msgspec.structs.replace(
            marks, worst=min(marks.worst, low), best=best, best_on=best_on, confirmed=confirmed
        )

    def _average(self, task: str, rewards: Sequence[float], level_before: float | None) -> None:
        marks, count = self.by_task[task], len(rewards)
        marks = msgspec.structs.replace(marks, mean=_moved(marks.mean, sum(rewards) / count, count))
        full, passed = marks.full, marks.passed
        if level_before is not None and marks.level - level_before > MARGIN * (marks.level - marks.worst):
            passed = None  # What counted as full marks until now does not any more.
        if full is not None:
            passed = _moved(passed, sum(reward >= full for reward in rewards) / count, count)
        self.by_task[task] = msgspec.structs.replace(marks, passed=passed)


def needs_of(pass_rates: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of our answers that fail, by task.

    >>> needs_of({"rev": 0.25})
    {'rev': 0.75}
    """
    return {task: 1.0 - rate for task, rate in pass_rates.items()}


def _moved(mean: float | None, observed: float, count: int) -> float:
    """A running mean after `count` observations more, whose mean is `observed`."""
    return observed if mean is None else mean + (observed - mean) * count / (count + MEMORY_ANSWERS)


def _scored(group: RolloutGroup) -> list[float]:
    return [reward for reward in group.rewards if reward is not None]

"""How many answers each example of a round gets: a few to all, the rest where they are likely to teach.

probes (half of a group each), scored -> [Budget.deal] -> answers wanted of each -> widen -> partial.py

A group of equal rewards has no gradient, and with one size for all examples that is 40 to 50 % of them here:
easy examples get more answers than they need, hard ones fewer. So a round has the answers that it always had,
but deals them twice. First each example gets a probe. What its rewards say, together with the running pass
rate of its task, is a Beta distribution over its own pass rate. Then each further answer goes where it adds
most to the chance that a group's rewards differ: a knapsack, as in Knapsack RL (arXiv 2509.25849), over a
posterior. A probe whose rewards differ needs no more; one that is all right or all wrong gets the more the
less sure it is to stay so, which is XRPO's uncertainty (arXiv 2510.06672), and of the hard ones those that
their task's pass rate leaves hope for (DARS, arXiv 2508.13755, gives more to the hard). The chance rises ever
more slowly, so dealing one after the other is the best deal there is.

Knapsack RL weighs the chance with the progress to be had, E[p (1 - p)^2]; here that, the square root of the
size, and both were tried and ended lower than the chance alone (benchmarks/README.md).

All of it depends on rewards and an order by seed alone: the same seed deals the same budgets, and who resumes
deals again what was dealt before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import msgspec

from swarmnode.types import has_gradient

PRIOR_ANSWERS = 2.0
"""So many imagined answers, right as often as those of its task, are counted with the probe of an example."""

MEMORY_ANSWERS = 512.0
"""Answers that the running pass rate of a task remembers: a policy changes within some ten rounds."""

WIDEST = 4
"""Most answers to one example, in units of the group size."""


class PassRate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How often the answers to a task are right lately: rewards on a scale from the lowest to the highest."""

    passes: float = 1.0
    answers: float = 2.0
    """Begins with one right and one wrong answer: nothing is known."""
    low: float = 0.0
    high: float = 1.0
    """Rewards between which the scale lies; wider where others were seen."""

    @property
    def mean(self) -> float:
        return self.passes / self.answers

    def scaled(self, rewards: Sequence[float]) -> float:
        """Sum of the rewards on this scale.

        >>> PassRate(low=0.0, high=2.0).scaled([2.0, 1.0])
        1.5
        """
        return sum((reward - self.low) / (self.high - self.low) for reward in rewards)

    def after(self, rewards: Sequence[float]) -> "PassRate":
        """What is known with these rewards."""
        if not rewards:
            return self
        low, high = min(self.low, *rewards), max(self.high, *rewards)
        scale = PassRate(low=low, high=high)
        kept = min(1.0, MEMORY_ANSWERS / (self.answers + len(rewards)))
        was = (self.passes * (self.high - self.low) + self.answers * (self.low - low)) / (high - low)
        return PassRate(kept * (was + scale.scaled(rewards)), kept * (self.answers + len(rewards)), low, high)


@dataclass(frozen=True, slots=True)
class Probe:
    """What the first answers to an example say: right and wrong ones as those of a Beta distribution."""

    right: float
    wrong: float
    answers: int
    mixed: bool
    """Rewards differ already."""
    easy: bool
    """More right than wrong."""

    def gains(self, most: int) -> Iterator[float]:
        """What each further answer, up to `most` in all, adds to the chance that rewards differ: none where
        they do; else the chance that all before it are like those of the probe, and it is not."""
        alike, same = 0.0 if self.mixed else 1.0, self.right if self.easy else self.wrong
        for more in range(most - self.answers):
            again = alike * (same + more) / (self.right + self.wrong + more)
            yield alike - again
            alike = again


def probe_of(rewards: Sequence[float | None], rate: PassRate) -> Probe:
    """
    >>> probe_of([0.0, 0.0, 0.0, 0.0], PassRate())
    Probe(right=1.0, wrong=5.0, answers=4, mixed=False, easy=False)
    """
    scored = [reward for reward in rewards if reward is not None]
    passes = min(max(rate.scaled(scored), 0.0), float(len(scored)))
    return Probe(
        right=PRIOR_ANSWERS * rate.mean + passes,
        wrong=PRIOR_ANSWERS * (1.0 - rate.mean) + len(scored) - passes,
        answers=len(rewards),
        mixed=has_gradient(rewards),
        easy=2 * passes > len(scored),
    )


def deal(probes: Sequence[Probe], answers: int, most: int) -> list[int]:
    """More answers for each example, `answers` in all where they fit, none with more than `most`: each where
    it gains most, the first of equal ones. Where nothing is to be gained any more, the smallest grow.

    >>> deal([probe_of([0.0, 1.0], PassRate()), probe_of([0.0, 0.0], PassRate())], 3, most=4)
    [1, 2]
    """
    gains = [(-gain, place) for place, probe in enumerate(probes) for gain in probe.gains(most) if gain > 0]
    more = [0] * len(probes)
    for _, place in sorted(gains)[:answers]:
        more[place] += 1
    sizes = [(probe.answers + more[place], place) for place, probe in enumerate(probes)]
    heapify(sizes)
    for _ in range(answers - sum(more)):
        smallest, place = sizes[0]
        if smallest >= most:
            break
        heapreplace(sizes, (smallest + 1, place))
        more[place] += 1
    return more


class Budget:
    """The budgets of one policy's rounds: what was seen of each task, and how large a probe is."""

    def __init__(self, group_size: int, most: int) -> None:
        """`group_size`: answers to an example on average; `most`: to any of them."""
        self._group_size = group_size
        self._most = min(WIDEST * group_size, most)
        self.rates: Mapping[str, PassRate] = {}
        """The pass rate of each task. Replaced and never changed, so that whoever has them has them as they
        were."""

    @property
    def probe_size(self) -> int:
        return probe_size(self._group_size)

    def deal(self, tasks: Sequence[str], rewards: Sequence[Sequence[float | None]]) -> list[int]:
        """Answers wanted in all of each example, the first ones of which have these rewards. Only as many of
        them as a probe has are looked at: who deals again after more are there deals the same."""
        first = [list(of_one[: self.probe_size]) for of_one in rewards]
        probes = [
            probe_of(of_one, self.rates.get(task, PassRate()))
            for task, of_one in zip(tasks, first, strict=True)
        ]
        left = self._group_size * len(probes) - sum(probe.answers for probe in probes)
        more = deal(probes, left, self._most)
        rates = dict(self.rates)
        for task, of_one in zip(tasks, first, strict=True):
            scored = [reward for reward in of_one if reward is not None]
            rates[task] = rates.get(task, PassRate()).after(scored)
        self.rates = rates
        return [probe.answers + extra for probe, extra in zip(probes, more, strict=True)]


def probe_size(group_size: int) -> int:
    """Answers that every example gets: half of a group, and two at least.

    >>> probe_size(8), probe_size(2)
    (4, 2)
    """
    return max(2, group_size // 2)

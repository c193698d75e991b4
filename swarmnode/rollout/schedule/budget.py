"""How many answers each example of a round gets: a few to all, the rest where they are likely to teach.

probes (half of a group each), scored -> [Budget.deal] -> answers wanted of each -> widen -> partial.py

A group of equal rewards has no gradient, and with one size for all examples that is 40 to 50 % of them here:
easy examples get more answers than they need, hard ones fewer. So a round has the answers that it always had,
but deals them twice. First each example gets a probe. What its rewards say, together with the running pass
rate of its task, is a Beta distribution over its pass rate p. Then the other half goes where it is worth most
(a knapsack, as in Knapsack RL, arXiv 2509.25849). The worth of n answers to an example is

    E[p (1 - p)^2]  x  chance that the rewards of the group differ  x  sqrt(n)

The first factor is the progress that is to be had (Knapsack RL, section 3): none where all is right, so such
examples stop at their probe, and most where a third is right. The second is 1 once the probe has rewards that
differ; before that it grows with each answer, quickly where the uncertainty about p is large (XRPO, arXiv
2510.06672; DARS, arXiv 2508.13755, gives more to hard examples likewise). The third is how the signal of a
gradient estimate grows over its noise.

All of it depends on rewards and an order by seed alone: the same seed deals the same budgets, and who resumes
deals again what was dealt before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

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
    """All rewards are alike, and more right than wrong."""

    @property
    def progress(self) -> float:
        """E[p (1 - p)^2]."""
        a, b, n = self.right, self.wrong, self.right + self.wrong
        return a * b * (b + 1) / (n * (n + 1) * (n + 2))

    def worth(self, most: int) -> Iterator[float]:
        """Of the probe alone, and with one more answer each time, up to `most` in all."""
        alike, same = 1.0, self.right if self.easy else self.wrong
        for more in range(most - self.answers + 1):
            chance = 1.0 if self.mixed else 1.0 - alike
            yield self.progress * chance * sqrt(self.answers + more)
            alike *= (same + more) / (self.right + self.wrong + more)


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
    """More answers for each example, `answers` in all: where they add the most worth, never above `most`.

    An answer alone may be worth little and several together much, so what is compared are the slopes of the
    concave hull of each worth: dealt in the order of their slopes no other deal of as many answers is worth
    more, but for the last slope, of which a part may be left over. Of equal slopes the first counts.
    """
    slopes = [
        (-slope, place, number, length)
        for place, probe in enumerate(probes)
        for number, (slope, length) in enumerate(hull(list(probe.worth(most))))
    ]
    more = [0] * len(probes)
    for _, place, _, length in sorted(slopes):
        taken = min(length, answers)
        more[place] += taken
        answers -= taken
    return more


def hull(worth: Sequence[float]) -> list[tuple[float, int]]:
    """Slopes of the concave hull above a sequence that rises, with the length of each, the steepest first.

    >>> hull([0.0, 1.0, 4.0, 5.0])
    [(2.0, 2), (1.0, 1)]
    """
    found: list[tuple[float, int]] = []
    for step in range(1, len(worth)):
        slope, length = worth[step] - worth[step - 1], 1
        while found and found[-1][0] <= slope:
            before, steps = found.pop()
            slope = (slope * length + before * steps) / (length + steps)
            length += steps
        found.append((slope, length))
    return [(slope, length) for slope, length in found if slope > 0]


class Budget:
    """The budgets of one policy's rounds: what was seen of each task, and how large a probe is."""

    def __init__(self, group_size: int, most: int) -> None:
        """`group_size`: answers to an example on average; `most`: to any of them."""
        self._group_size = group_size
        self._most = min(WIDEST * group_size, most)
        self.rates: Mapping[str, PassRate] = {}
        """By task. Replaced and never changed, so that whoever has them has them as they were."""

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

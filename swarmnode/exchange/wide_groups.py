"""Wide groups, of which a node looks at a part and keeps the most telling answers.

body of a wide group -> [parts] -> judged part by part, as long as there is time -> [most_telling] -> buffer
own group too large for a body -> [narrowed] -> announcing.py

A wide group finds what a narrow one misses: with 512 answers to one question a pass rate of 1 in 200 shows up
(BroRL, arXiv 2510.01180). A node that hears of one need not pay for all of it. It looks at as many answers as
it has time for, in an order that the author cannot know, and keeps those whose rewards differ most: of m out
of n answers these teach as much as all of them (max-variance down-sampling, PODS, arXiv 2504.13818).
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean

from swarmnode.types import RolloutGroup


def parts(count: int, size: int, rng: random.Random) -> list[list[int]]:
    """Places of so many answers in parts of at most `size`: all of them as they come where that is one part,
    else in any order.

    >>> parts(3, 4, random.Random(0)), [len(part) for part in parts(9, 4, random.Random(0))]
    ([[0, 1, 2]], [4, 4, 1])
    """
    places = list(range(count))
    if count > size:
        rng.shuffle(places)
    return [places[start : start + size] for start in range(0, count, size)]


def most_telling(rewards: Sequence[float | None], limit: int, rng: random.Random) -> list[int]:
    """Places of at most `limit` answers: all of them, or those scored ones whose rewards differ most. Among
    equal rewards by lot: an author must not choose by order.

    >>> most_telling([1.0, 1.0, 1.0, 0.0, None], 2, random.Random(0))[-1]
    3
    """
    if len(rewards) <= limit:
        return list(range(len(rewards)))
    scored = [(reward, place) for place, reward in enumerate(rewards) if reward is not None]
    rng.shuffle(scored)
    scored.sort(key=lambda one: one[0])
    if len(scored) > limit:
        lowest = _lowest_of_widest([reward for reward, _ in scored], limit)
        scored = scored[:lowest] + scored[len(scored) - (limit - lowest) :]
    return sorted(place for _, place in scored)


def narrowed(group: RolloutGroup, limit: int, rng: random.Random) -> RolloutGroup:
    """The group with at most `limit` of its answers, the most telling ones."""
    if len(group.completions) <= limit:
        return group
    places = most_telling(group.rewards, limit, rng)
    return replace(
        group,
        completions=tuple(group.completions[place] for place in places),
        scores=tuple(group.scores[place] for place in places),
    )


def _lowest_of_widest(ordered: Sequence[float], limit: int) -> int:
    """Returns how many of the `limit` rewards with the largest variance are the lowest; the rest are the
    highest. Of equally good choices the most even one.

    >>> _lowest_of_widest([0.0] * 10 + [1.0] * 3, 4), _lowest_of_widest([0.0] * 12 + [1.0], 4)
    (2, 2)
    """
    centre = fmean(ordered)
    shifted = [reward - centre for reward in ordered]
    sums = [0.0, *accumulate(shifted)]
    squares = [0.0, *accumulate(value * value for value in shifted)]

    def spread(lowest: int) -> tuple[float, int]:
        rest = len(ordered) - (limit - lowest)
        total = sums[lowest] + sums[-1] - sums[rest]
        square = squares[lowest] + squares[-1] - squares[rest]
        # Rounding must not decide between choices that are equally good.
        return round(square - total * total / limit, 9), -abs(2 * lowest - limit)

    return max(range(limit + 1), key=spread)

"""Credit: how much better than its own group a completion was.

scored groups -> shaping -> [advantage] -> packing -> losses

Which of the functions here belongs to which loss stands in its record (`losses.Loss.advantage`).
"""

from collections.abc import Callable, Sequence
from statistics import fmean

from swarmnode.types import has_gradient, spread_of

Advantage = Callable[[Sequence[float]], Sequence[float]]
"""The rewards of a group, two at least and not all equal, to as many advantages."""

EPSILON = 1e-4
"""Keeps the division finite. Small against the spread of 0/1 rewards (at least 0.04 in a group of 512)."""


def group_advantages(rewards: Sequence[float | None], advantage: Advantage) -> list[float | None] | None:
    """One advantage per completion of a group.

    Unscored completions (None) stay out of every mean and get None. Returns None for the whole group when
    fewer than two were scored or all scored rewards are equal: a zero-advantage group has no gradient.

    >>> group_advantages([1.0, 0.0, None, 1.0, 0.0], standardised)
    [0.9998000399920016, -0.9998000399920016, None, 0.9998000399920016, -0.9998000399920016]
    >>> group_advantages([1.0, 0.0, 0.0, 0.0], centred)
    [0.75, -0.25, -0.25, -0.25]
    """
    if not has_gradient(rewards):
        return None
    credit = iter(advantage([reward for reward in rewards if reward is not None]))
    return [None if reward is None else next(credit) for reward in rewards]


def standardised(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (standard deviation + EPSILON): GRPO (Shao et al. 2024, section 4.1.2).

    >>> [round(advantage, 3) for advantage in standardised([2.0, 0.0])]
    [1.0, -1.0]
    """
    mean, spread = fmean(rewards), spread_of(rewards)
    return [(reward - mean) / (spread + EPSILON) for reward in rewards]


def centred(rewards: Sequence[float]) -> list[float]:
    """reward - mean: Dr. GRPO (Liu et al. 2025, section 3.2). Dividing by the standard deviation makes
    questions that are nearly always or nearly never answered right count more than the others.

    >>> centred([2.0, 0.0])
    [1.0, -1.0]
    """
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def against_the_others(rewards: Sequence[float]) -> list[float]:
    """reward - mean of the others' rewards: RLOO (Kool et al. 2019; Ahmadian et al. 2024, section 3.3).

    The baseline does not depend on the answer it judges, so the policy gradient stays unbiased. It is
    `centred` times G / (G - 1).

    >>> against_the_others([2.0, 0.0, 0.0])
    [2.0, -1.0, -1.0]
    """
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]

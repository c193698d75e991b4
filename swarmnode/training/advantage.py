"""Credit: how much better than its own group a completion was.

scored groups -> [advantage] -> packing -> loss
"""

from collections.abc import Sequence
from statistics import fmean, pstdev

from swarmnode.types import has_gradient

EPSILON = 1e-4
"""Keeps the division finite. Small against the spread of 0/1 rewards (at least 0.12 in a group of 64)."""


def group_advantages(rewards: Sequence[float | None]) -> list[float | None] | None:
    """GRPO's advantage: (reward - group mean) / group standard deviation (Shao et al. 2024, section 4.1).

    Unscored completions (None) stay out of mean and spread and get None. Returns None for the whole group
    when fewer than two were scored or all scored rewards are equal: a zero-advantage group has no gradient.

    >>> group_advantages([1.0, 0.0, None, 1.0, 0.0])
    [0.9998000399920016, -0.9998000399920016, None, 0.9998000399920016, -0.9998000399920016]
    """
    if not has_gradient(rewards):
        return None
    scored = [reward for reward in rewards if reward is not None]
    mean, spread = fmean(scored), pstdev(scored)
    return [None if reward is None else (reward - mean) / (spread + EPSILON) for reward in rewards]

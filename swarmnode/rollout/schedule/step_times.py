"""Learns the cost of an engine's step from measured times of steps.

partial_rollouts.py -> observe -> [StepTimes] -> StepCost -> concurrency_control.py
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: `base_s` + `per_request_s` * running requests, for requests of recent context
    lengths."""

    base_s: float
    per_request_s: float

    @property
    def alpha(self) -> float:
        """The base cost in units of one request."""
        return self.base_s / self.per_request_s


# ---- the cost of a step, learned from step times ----

TIMES_PER_CELL = 31
CELLS_PER_OCTAVE = 2
FEWEST_TIMES = 3
"""The fewest steps of a cell that is used: fewer measure noise rather than steps."""
WIDEST_FACTOR = 8.5
"""Steps with fewer requests than the largest ones, by more than this factor, are left out: the cost is only
piecewise linear, and C is chosen for large numbers of requests."""
NARROWEST_FACTOR = 2.0
"""The smallest ratio between two numbers of requests that can separate a from b."""

ROUNDING = 1e-9
"""Share of a step below which a rise counts as none."""
SAME_COLUMNS = 1e-5
"""Share of the largest singular value below which another counts as zero: two terms are then the same."""
FORGETTING = 0.999
"""Weight of the past after each step in the average context length."""


class TimedStep(NamedTuple):
    """One measured step that only advanced running requests."""

    running: float
    context: float
    """Total number of tokens that all running requests attend to, prompts included. 0: not counted."""
    seconds: float


class StepTimes:
    """Recent step times by number of running requests and context length. Uses medians, so that outliers do
    not count.

    >>> times = StepTimes()
    >>> for running in (10, 20, 40) * 5: times.observe(running, 0.03 + 0.001 * running)
    >>> cost = times.cost()
    >>> round(cost.base_s, 6), round(cost.per_request_s, 6), round(cost.alpha, 3)
    (0.03, 0.001, 30.0)
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], deque[TimedStep]] = {}
        self._requests = self._context = 0.0

    def observe(self, running: int, seconds: float, context: int = 0) -> None:
        cell = (_octaves(running), _octaves(max(1.0, context / running)))
        self._cells.setdefault(cell, deque(maxlen=TIMES_PER_CELL)).append(
            TimedStep(running, context, seconds)
        )
        self._requests = FORGETTING * self._requests + running
        self._context = FORGETTING * self._context + context

    def cost(self) -> StepCost | None:
        """Fits the cost by least squares of relative errors through the median of each cell. None: too little
        is known."""
        steps = [_middle(cell) for cell in self._cells.values() if len(cell) >= FEWEST_TIMES]
        most = max((step.running for step in steps), default=0.0)
        steps = [step for step in steps if step.seconds > 0 and step.running * WIDEST_FACTOR >= most]
        if not steps or most < NARROWEST_FACTOR * min(step.running for step in steps):
            return None
        return fit(steps, self._context / self._requests)


def _octaves(value: float) -> int:
    return round(CELLS_PER_OCTAVE * log2(value))


def _middle(cell: Iterable[TimedStep]) -> TimedStep:
    running, context, seconds = zip(*cell, strict=True)
    return TimedStep(median(running), median(context), median(seconds))


def fit(steps: Sequence[TimedStep], context: float = 0.0) -> StepCost | None:
    """Returns the cost with the smallest relative errors, for requests that attend to `context` tokens each.
    None: the cost does not rise with the number of requests.

    >>> fit([TimedStep(1, 0, 3.0), TimedStep(2, 0, 4.0), TimedStep(4, 0, 6.0)])
    StepCost(base_s=2.0, per_request_s=1.0)
    >>> fit([TimedStep(1, 0, 3.0), TimedStep(2, 0, 3.0)]) is None
    True
    >>> longer = [TimedStep(n, n * each, 5 + n + n * each / 10) for n, each in ((1, 20), (4, 10), (8, 5))]
    >>> fit(longer, context=10)
    StepCost(base_s=5.0, per_request_s=2.0)
    """
    found = _relative_least_squares(steps, ("base", "running", "context"))
    if found is None or min(found) < 0:
        # No cost is negative: the lengths were too similar to separate the three terms.
        found = _relative_least_squares(steps, ("base", "running"))
    if found is None:
        return None
    base, per_request = found[0], found[1] + (context * found[2] if len(found) > 2 else 0.0)
    typical = sorted(steps)[len(steps) // 2]
    if per_request * typical.running < ROUNDING * typical.seconds:
        return None
    return StepCost(round(max(0.0, base), 12), round(per_request, 12))


def _relative_least_squares(steps: Sequence[TimedStep], terms: Sequence[str]) -> list[float] | None:
    """Returns one factor per term. None: the terms cannot be told apart."""
    values = {
        "base": lambda step: 1.0,
        "running": lambda step: step.running,
        "context": lambda step: step.context,
    }
    rows = np.array([[values[term](step) / step.seconds for term in terms] for step in steps])
    scales = np.abs(rows).max(axis=0)
    if not scales.all():
        return None
    found, _, rank, _ = np.linalg.lstsq(rows / scales, np.ones(len(steps)), rcond=SAME_COLUMNS)
    return (found / scales).tolist() if rank == len(terms) else None

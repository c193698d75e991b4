"""What a step of an engine costs, learned from the times of its steps.

partial.py -> seconds of each step -> [StepTimes] -> StepCost -> concurrency.py -> C

A step of n running requests that look back on k tokens together takes a + b*n + c*k seconds: `a` is paid for
every step (weights are read, kernels launched), `b` for every request, `c` for every token that attention
reads. Without c, a and b would be wrong: where all start together, steps of few requests are those of long
answers; where the engine is kept full, they are the very first ones, of short answers.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median
from typing import NamedTuple

TIMES_PER_CELL = 31
CELLS_PER_OCTAVE = 2
FEWEST_TIMES = 3
"""A cell with fewer steps than this says more about noise than about steps."""
WIDEST_FACTOR = 8.5
"""Steps of fewer requests than the largest ones, by more than this factor, are left out: the cost is a line
only piece by piece, and C is chosen where many run."""
NARROWEST_FACTOR = 2.0
"""Numbers of requests that are closer than this factor cannot tell a from b."""

ROUNDING = 1e-9
"""A rise that is a smaller share of a step is none; of a pivot: two columns say the same."""
FORGETTING = 0.999
"""Weight of the past after each step, where the length that requests look back on is averaged."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: `base_s` + `per_request_s` * running requests, as long as those look back as far as
    they did lately."""

    base_s: float
    per_request_s: float

    @property
    def alpha(self) -> float:
        """The base in units of one request."""
        return self.base_s / self.per_request_s


class Step(NamedTuple):
    """One that did nothing but advance what runs."""

    running: float
    context: float
    """Tokens that all running requests look back on together, prompts included; 0 where nobody counts."""
    seconds: float


class StepTimes:
    """Recent step times by number of running requests and by their length; medians, so that a hiccup counts
    for nothing.

    >>> times = StepTimes()
    >>> for running in (10, 20, 40) * 5: times.observe(running, 0.03 + 0.001 * running)
    >>> cost = times.cost()
    >>> round(cost.base_s, 6), round(cost.per_request_s, 6), round(cost.alpha, 3)
    (0.03, 0.001, 30.0)
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], deque[Step]] = {}
        self._requests = self._context = 0.0

    def observe(self, running: int, seconds: float, context: int = 0) -> None:
        cell = (_octaves(running), _octaves(max(1.0, context / running)))
        self._cells.setdefault(cell, deque(maxlen=TIMES_PER_CELL)).append(Step(running, context, seconds))
        self._requests = FORGETTING * self._requests + running
        self._context = FORGETTING * self._context + context

    def cost(self) -> StepCost | None:
        """Least squares, relative error, through the median of each cell. None: not enough is known."""
        steps = [_middle(cell) for cell in self._cells.values() if len(cell) >= FEWEST_TIMES]
        most = max((step.running for step in steps), default=0.0)
        steps = [step for step in steps if step.seconds > 0 and step.running * WIDEST_FACTOR >= most]
        if not steps or most < NARROWEST_FACTOR * min(step.running for step in steps):
            return None
        return fit(steps, self._context / self._requests)


def _octaves(value: float) -> int:
    return round(CELLS_PER_OCTAVE * log2(value))


def _middle(cell: Iterable[Step]) -> Step:
    running, context, seconds = zip(*cell, strict=True)
    return Step(median(running), median(context), median(seconds))


def fit(steps: Sequence[Step], context: float = 0.0) -> StepCost | None:
    """The cost with the smallest relative errors, of requests that look back on `context` tokens each. None:
    it does not rise with their number.

    >>> fit([Step(1, 0, 3.0), Step(2, 0, 4.0), Step(4, 0, 6.0)])
    StepCost(base_s=2.0, per_request_s=1.0)
    >>> fit([Step(1, 0, 3.0), Step(2, 0, 3.0)]) is None
    True
    >>> longer = [Step(n, n * each, 5 + n + n * each / 10) for n, each in ((1, 20), (4, 10), (8, 5))]
    >>> fit(longer, context=10)
    StepCost(base_s=5.0, per_request_s=2.0)
    """
    found = _relative_least_squares(steps, ("base", "running", "context"))
    if found is None or min(found) < 0:
        # Nothing costs less than nothing: the lengths were too much alike to tell the three apart.
        found = _relative_least_squares(steps, ("base", "running"))
    if found is None:
        return None
    base, per_request = found[0], found[1] + (context * found[2] if len(found) > 2 else 0.0)
    typical = sorted(steps)[len(steps) // 2]
    if per_request * typical.running < ROUNDING * typical.seconds:
        return None
    return StepCost(round(max(0.0, base), 12), round(per_request, 12))


def _relative_least_squares(steps: Sequence[Step], terms: Sequence[str]) -> list[float] | None:
    """One factor per term; None where they cannot be told apart."""
    values = {
        "base": lambda step: 1.0,
        "running": lambda step: step.running,
        "context": lambda step: step.context,
    }
    rows = [[values[term](step) / step.seconds for term in terms] for step in steps]
    scales = [max(abs(row[i]) for row in rows) for i in range(len(terms))]
    if not all(scales):
        return None
    rows = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    normal = [[sum(r[i] * r[j] for r in rows) for j in range(len(terms))] for i in range(len(terms))]
    found = _solved(normal, [sum(r[i] for r in rows) for i in range(len(terms))])
    return found and [value / scale for value, scale in zip(found, scales, strict=True)]


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """The solution of a symmetric positive system, by elimination; None if it is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        if pivot[i] < ROUNDING * matrix[i][i]:
            return None
        for j, row in enumerate(rows):
            if j != i:
                factor = row[i] / pivot[i]
                rows[j] = [a - factor * b for a, b in zip(row, pivot, strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]

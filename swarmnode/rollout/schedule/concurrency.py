"""The number of requests to keep in the engine, from the cost of its steps."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2
from statistics import fmean, median
from typing import NamedTuple

SMALL_OVERHEAD = 0.1
"""Value of a/(b*C) below which more requests could save at most this share of a step's time."""

MARGIN_VERSIONS = 2
"""Versions kept back from the bound on age: an answer waits for its group, a group for the end of a round."""

REFILL_SHARE = 1 / 16
"""Share of C that must be free before requests start. A step that starts any costs extra, however many; so
they start in batches, and slots that are empty meanwhile cost less."""

RAMP = (1 / 8, 1 / 4, 1 / 2)
"""Shares of C in the first steps: steps of a single size would not tell a from b."""
STEPS_PER_RAMP_LEVEL = 6

RECENT_COMPLETIONS = 1024
"""Number of recent completions from which the longest and the mean length are taken."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: `base_s` + `per_request_s` * running requests, for requests that look back as far as
    lately."""

    base_s: float
    per_request_s: float

    @property
    def alpha(self) -> float:
        """The base in units of one request."""
        return self.base_s / self.per_request_s


def choose_concurrency(
    cost: StepCost | None, tail: float | None, *, round_requests: int, max_running: int, max_lag: int
) -> int:
    """Requests to keep in the engine: enough to hide the base of a step, few enough to stay young.

    `tail` is longest/mean length, `round_requests` the completions of one round. Never fewer than those:
    below, a round is slower than a synchronous one, and the bound on age is kept anyway (under_way.py). While
    either measurement is missing, as many.

    >>> cost = StepCost(base_s=0.035, per_request_s=0.001)
    >>> choose_concurrency(cost, 5.0, round_requests=256, max_running=1024, max_lag=16)
    350
    >>> choose_concurrency(cost, 5.0, round_requests=64, max_running=1024, max_lag=12)
    128
    >>> choose_concurrency(cost, 5.0, round_requests=256, max_running=300, max_lag=16)
    300
    >>> choose_concurrency(None, None, round_requests=256, max_running=1024, max_lag=4)
    256
    """
    wanted = round_requests
    if cost is not None and tail is not None:
        cheap = ceil(round(cost.alpha / SMALL_OVERHEAD, 6))
        young = floor((max_lag - MARGIN_VERSIONS) * round_requests / tail)
        wanted = max(round_requests, min(cheap, young))
    return max(1, min(wanted, max_running))


def gain_ceiling(alpha: float, tail: float, round_requests: int, concurrency: int) -> float:
    """Returns the largest gain of refilling over waiting for all, as a ratio of trained responses per second.

    A synchronous round of N takes L_max steps of `a` and N * mean tokens of `b`; with C requests at any time
    it is N * mean / C steps for the same tokens.

    >>> round(gain_ceiling(alpha=32, tail=5.55, round_requests=256, concurrency=256), 2)
    1.51
    >>> gain_ceiling(alpha=0, tail=5.55, round_requests=256, concurrency=256)
    1.0
    """
    return (alpha * tail / round_requests + 1) / (alpha / concurrency + 1)


class ConcurrencyControl:
    """Chooses C, the number of requests in the engine, for each round from measured steps; or keeps it
    `fixed`.

    >>> control = ConcurrencyControl(round_requests=64, max_running=1024, max_lag=12)
    >>> control.limit
    8
    >>> for running in (8,) * 6 + (16,) * 6 + (32,) * 6:
    ...     control.observe_step(running, 0.03 + 0.001 * running)
    >>> control.limit, control.concurrency
    (64, 64)
    >>> for tokens in (10, 20, 60): control.observe_completion(tokens)
    >>> control.choose()
    >>> control.concurrency
    300
    """

    def __init__(
        self, *, round_requests: int, max_running: int, max_lag: int, fixed: int | None = None
    ) -> None:
        self._round_requests = round_requests
        self._max_running = max_running
        self._max_lag = max_lag
        self._fixed = fixed
        self._times = StepTimes()
        self._tokens: deque[int] = deque(maxlen=RECENT_COMPLETIONS)
        self._steps = 0
        self.concurrency = 1
        """C: requests that the engine should have."""
        self.choose()

    @property
    def cost(self) -> StepCost | None:
        """Cost of a step, as measured so far. None: not known yet."""
        return self._times.cost()

    @property
    def tail(self) -> float | None:
        """Longest over mean length of recent completions."""
        return max(self._tokens) / fmean(self._tokens) if self._tokens else None

    @property
    def limit(self) -> int:
        """Requests that the engine may have before the next step: C, but for the first few steps. Most of
        those start nothing (but never leave the engine empty), so that they can be measured."""
        level, step = divmod(self._steps, STEPS_PER_RAMP_LEVEL)
        if self._fixed is not None or level >= len(RAMP):
            return self.concurrency
        return ceil(self.concurrency * RAMP[level]) if step == 0 else 1

    def free_slots(self, in_engine: int) -> int:
        """Returns the number of requests to start before the next step, with `in_engine` in the engine: 0, or
        a batch."""
        free = self.limit - in_engine
        return free if free >= max(1, int(self.concurrency * REFILL_SHARE)) or not in_engine else 0

    def observe_step(self, running: int, seconds: float | None, context: int = 0) -> None:
        """`seconds`: None for a step that did more than advance running requests. `context`: tokens that all
        of them together look back on."""
        self._steps += 1
        if seconds is not None:
            self._times.observe(running, seconds, context)

    def observe_completion(self, tokens: int) -> None:
        self._tokens.append(tokens)

    def fix(self, requests: int) -> None:
        """Fixes C from now on."""
        self._fixed = requests
        self.choose()

    def choose(self) -> None:
        """Chooses C for the next round."""
        if self._fixed is not None:
            self.concurrency = min(self._fixed, self._max_running)
        else:
            self.concurrency = choose_concurrency(
                self.cost,
                self.tail,
                round_requests=self._round_requests,
                max_running=self._max_running,
                max_lag=self._max_lag,
            )


# ---- what a step costs, learned from the times of steps ----

TIMES_PER_CELL = 31
CELLS_PER_OCTAVE = 2
FEWEST_TIMES = 3
"""Fewest steps of a cell that is used: fewer measure noise rather than steps."""
WIDEST_FACTOR = 8.5
"""Steps with fewer requests than the largest ones, by more than this factor, are left out: the cost is linear
only piece by piece, and C is chosen where many run."""
NARROWEST_FACTOR = 2.0
"""Least ratio of two numbers of requests that can tell a from b."""

ROUNDING = 1e-9
"""Share of a step below which a rise counts as none; of a pivot, below which two columns are the same."""
FORGETTING = 0.999
"""Weight of the past after each step in the average length that requests look back on."""


class TimedStep(NamedTuple):
    """One measured step that only advanced running requests."""

    running: float
    context: float
    """Tokens that all running requests look back on together, prompts included. 0: not counted."""
    seconds: float


class StepTimes:
    """Recent step times by number of running requests and by their length; medians, so that an outlier does
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
    """Returns the cost with the smallest relative errors, for requests that look back on `context` tokens
    each. None: it does not rise with their number.

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
        # Nothing costs less than nothing: the lengths were too much alike to tell the three apart.
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
    rows = [[values[term](step) / step.seconds for term in terms] for step in steps]
    scales = [max(abs(row[i]) for row in rows) for i in range(len(terms))]
    if not all(scales):
        return None
    rows = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    normal = [[sum(r[i] * r[j] for r in rows) for j in range(len(terms))] for i in range(len(terms))]
    found = _solved(normal, [sum(r[i] for r in rows) for i in range(len(terms))])
    return found and [value / scale for value, scale in zip(found, scales, strict=True)]


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Returns the solution of a symmetric positive system, by elimination. None: it is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        if pivot[i] < ROUNDING * matrix[i][i]:
            return None
        for j, row in enumerate(rows):
            if j != i:
                factor = row[i] / pivot[i]
                rows[j] = [a - factor * b for a, b in zip(row, pivot, strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]

"""Chooses the number of requests to keep in the engine, from the cost of its steps."""

from collections import deque
from math import ceil, floor
from statistics import fmean

from swarmnode.rollout.schedule.step_times import StepCost, StepTimes

SMALL_OVERHEAD = 0.1
"""Value of a/(b*C) below which more requests would save at most this share of a step's time."""

MARGIN_VERSIONS = 2
"""Versions to stay below the bound on age: an answer waits for its group, and a group for the end of a
round."""

REFILL_SHARE = 1 / 16
"""Share of C that must be free before requests start. A step that starts any requests costs extra, however
many; so they start in batches, and the slots that are empty meanwhile cost less."""

RAMP = (1 / 8, 1 / 4, 1 / 2)
"""Shares of C in the first steps: steps of a single size could not separate a from b."""
STEPS_PER_RAMP_LEVEL = 6

RECENT_COMPLETIONS = 1024
"""Number of recent completions over which the longest and the mean length are taken."""


def choose_concurrency(
    cost: StepCost | None, tail: float | None, *, round_requests: int, max_running: int, max_lag: int
) -> int:
    """Returns the number of requests to keep in the engine: enough to hide the base of a step, few enough to
    stay young.

    `tail` is longest/mean length, `round_requests` the completions of one round. Returns at least that many,
    up to `max_running`: with fewer, a round would be slower than a synchronous one, and departure_order.py
    keeps the bound on age anyway. While either measurement is missing, the number is `round_requests`.

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
        """C: the number of requests that the engine should have."""
        self.choose()

    @property
    def cost(self) -> StepCost | None:
        """Measured cost of a step. None: not known yet."""
        return self._times.cost()

    @property
    def tail(self) -> float | None:
        """Longest over mean length of recent completions."""
        return max(self._tokens) / fmean(self._tokens) if self._tokens else None

    @property
    def limit(self) -> int:
        """The most requests that the engine may have before the next step: C, except during the first few
        steps. Most of those start nothing (but never leave the engine empty), so that they can be
        measured."""
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
        """Records a step. `seconds`: None if the step did more than advance running requests. `context`:
        total number of tokens that all of them attend to."""
        self._steps += 1
        if seconds is not None:
            self._times.observe(running, seconds, context)

    def observe_completion(self, tokens: int) -> None:
        self._tokens.append(tokens)

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

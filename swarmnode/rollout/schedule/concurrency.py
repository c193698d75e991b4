"""How many requests to keep in the engine, from what its steps cost.

partial.py -> seconds of each step, lengths -> [ConcurrencyControl] -> C -> partial.py
                                                  ^
                                                  | StepCost (step_cost.py)

A step of n running requests takes a + b*n seconds. So more requests at once make each token cheaper, until
a/(b*n) is small. But they also make answers older: the longest of them lives through about rho * C / N
updates of the policy, where rho is the longest length over the mean one.
"""

from collections import deque
from math import ceil, floor
from statistics import fmean

from swarmnode.rollout.schedule.step_cost import StepCost, StepTimes

SMALL_OVERHEAD = 0.1
"""a/(b*C) that is small enough: more requests could save at most this share of a step's time."""

MARGIN_VERSIONS = 2
"""Versions kept back from the bound on age: an answer waits for its group, a group for the end of a round."""

REFILL_SHARE = 1 / 16
"""Share of C that must be free before requests start. A step that starts any costs extra, however many they
are; so they start in batches, and the slots that are empty meanwhile cost less."""

RAMP = (1 / 8, 1 / 4, 1 / 2)
"""Shares of C at the very start: steps that are all of one size would say nothing about a and b."""
STEPS_PER_RAMP_LEVEL = 6

RECENT_COMPLETIONS = 1024
"""How many say what the longest and the mean length are."""


def choose_concurrency(
    cost: StepCost | None, tail: float | None, *, round_requests: int, max_running: int, max_lag: int
) -> int:
    """Requests to keep in the engine: enough to hide the base of a step, few enough to stay young.

    `tail` is longest/mean length, `round_requests` the completions of one round. Never fewer than those:
    below, a round is slower than a synchronous one, and the bound on age is kept anyway (staleness.py). While
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
    """Most that refilling can gain over waiting for all, in trained responses per second.

    A synchronous round of N takes L_max steps of `a` and N * mean tokens of `b`; with C requests at any time
    it is N * mean / C steps for the same tokens.

    >>> round(gain_ceiling(alpha=32, tail=5.55, round_requests=256, concurrency=256), 2)
    1.51
    >>> gain_ceiling(alpha=0, tail=5.55, round_requests=256, concurrency=256)
    1.0
    """
    return (alpha * tail / round_requests + 1) / (alpha / concurrency + 1)


class ConcurrencyControl:
    """C of a scheduler, chosen anew for each round from what was measured; or `fixed`.

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
        """What was measured so far."""
        return self._times.cost()

    @property
    def tail(self) -> float | None:
        """Longest over mean length of recent completions."""
        return max(self._tokens) / fmean(self._tokens) if self._tokens else None

    @property
    def limit(self) -> int:
        """Requests that the engine may have before the next step: C, but for the first few steps.

        There, most steps start nothing (but never is the engine left empty), so that they can be measured.
        """
        level, step = divmod(self._steps, STEPS_PER_RAMP_LEVEL)
        if self._fixed is not None or level >= len(RAMP):
            return self.concurrency
        return ceil(self.concurrency * RAMP[level]) if step == 0 else 1

    def free_slots(self, in_engine: int) -> int:
        """Requests to start before the next step, `in_engine` being there: none, or a batch."""
        free = self.limit - in_engine
        return free if free >= max(1, int(self.concurrency * REFILL_SHARE)) or not in_engine else 0

    def observe_step(self, running: int, seconds: float | None, context: int = 0) -> None:
        """`seconds` is None for a step that did more than advance what runs, `context` the tokens that all of
        these look back on together."""
        self._steps += 1
        if seconds is not None:
            self._times.observe(running, seconds, context)

    def observe_completion(self, tokens: int) -> None:
        self._tokens.append(tokens)

    def fix(self, requests: int) -> None:
        """C is this from now on."""
        self._fixed = requests
        self.choose()

    def choose(self) -> None:
        """Settle on C for the next round."""
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

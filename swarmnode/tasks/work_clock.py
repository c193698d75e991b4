"""The clock of a piece of work: how long it has been at work, and how long it may be.

daemon_threads.py, worker.py -> [on_the_clock] -> rewards and environments
loader.py (queueing for the lock), pool.py (a process that keeps a deadline of its own) -> [off_the_clock]
http_judge.py, code_tests.py -> [clock_of_work] -> how much time is left

Many ask for what only one can do at a time. The clock of each stands while it waits for the others, so that
nobody's deadline is used up by those before it.
"""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

LONGEST_QUEUE_S, QUEUED_LIMITS = 3600.0, 32
"""Work may wait for what is before it an hour, or so many times its own limit where that is longer."""


@dataclass(slots=True)
class WorkClock:
    """Seconds of one piece of work. Its own thread turns it off and on, and any thread may read it."""

    limit_s: float = math.inf
    """The longest that it may be at work."""
    now: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _off: tuple[float, float | None] = (0.0, None)
    """Seconds that it was off, and since when it is now."""

    def __post_init__(self) -> None:
        self._began = self.now()

    @property
    def off_s(self) -> float:
        """Seconds that the clock stood."""
        seconds, since = self._off
        return seconds if since is None else seconds + self.now() - since

    @property
    def left_s(self) -> float:
        """Seconds until nobody waits for the work any more, if it goes on as it does now."""
        queue_s = max(LONGEST_QUEUE_S, QUEUED_LIMITS * self.limit_s)
        worked_s = self.now() - self._began - self.off_s
        return queue_s - self.off_s if self._off[1] is not None else self.limit_s - worked_s

    @contextmanager
    def stopped(self) -> Generator[None, None, None]:
        """Let the clock stand for the length of a `with` block."""
        seconds, since = self._off
        if since is not None:
            yield
            return
        self._off = (seconds, self.now())
        try:
            yield
        finally:
            self._off = (self.off_s, None)


_CLOCK: ContextVar[WorkClock | None] = ContextVar("_CLOCK", default=None)


def on_the_clock(clock: WorkClock | None) -> None:
    """Let what runs in this context from now on be the work of this clock; None: nobody keeps its time."""
    _CLOCK.set(clock)


@contextmanager
def off_the_clock() -> Generator[None, None, None]:
    """Let the clock of the work that runs here stand for the length of a `with` block."""
    with clock_of_work().stopped():
        yield


def clock_of_work() -> WorkClock:
    """The clock of the work that runs here; one without a limit where nobody keeps its time."""
    return _CLOCK.get() or WorkClock()

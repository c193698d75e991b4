"""The clock of a piece of work: seconds at work, and the most that it may take."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

LONGEST_QUEUE_S, QUEUED_LIMITS = 3600.0, 32
"""Longest wait of work in a queue: an hour, or this many times its own limit if that is longer."""


@dataclass(slots=True)
class WorkClock:
    """The clock of one piece of work. Its own thread stops and restarts it, and any thread may read it."""

    limit_s: float = math.inf
    """Most seconds at work."""
    now: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _off: tuple[float, float | None] = (0.0, None)
    """Seconds that the clock was stopped before, and the time since when it is stopped now."""

    def __post_init__(self) -> None:
        self._began = self.now()

    @property
    def off_s(self) -> float:
        """Seconds that the clock was stopped."""
        seconds, since = self._off
        return seconds if since is None else seconds + self.now() - since

    @property
    def left_s(self) -> float:
        """Seconds until the work is given up, if the clock stays as it is now."""
        queue_s = max(LONGEST_QUEUE_S, QUEUED_LIMITS * self.limit_s)
        worked_s = self.now() - self._began - self.off_s
        return queue_s - self.off_s if self._off[1] is not None else self.limit_s - worked_s

    @contextmanager
    def stopped(self) -> Generator[None, None, None]:
        """Stops the clock for the duration of a `with` block."""
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
    """Counts the work in this context by this clock from now on. None: nothing is counted."""
    _CLOCK.set(clock)


@contextmanager
def off_the_clock() -> Generator[None, None, None]:
    """Stops the clock of the current work for the duration of a `with` block."""
    with clock_of_work().stopped():
        yield


def clock_of_work() -> WorkClock:
    """Returns the clock of the current work, or one without a limit if there is none."""
    return _CLOCK.get() or WorkClock()

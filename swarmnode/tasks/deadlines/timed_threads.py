"""Judgements in threads of this process, each with a deadline. A thread that overruns is left behind and
counted."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from swarmnode.errors import JudgementLost, JudgementOverran
from swarmnode.tasks.deadlines.daemon_threads import SHORTEST_WAIT_S, in_daemon_thread
from swarmnode.tasks.deadlines.task_lock import leave_behind

T = TypeVar("T")

MAX_STUCK = 4
"""Most threads that overran and cannot be ended. Beyond that, no judgement starts until one of them
returns."""


class TimedThreads:
    """Runs judgements one after another, each in a thread with a deadline."""

    def __init__(self, limit_s: float, stopped: "Future[None] | None" = None) -> None:
        """`stopped`: a future that ends all waiting once it is done."""
        self.limit_s = limit_s
        self.stuck = 0
        """Threads that overran and have not returned yet."""
        self._stopped: Future[None] = Future() if stopped is None else stopped

    def result_of(self, work: Callable[[], T], judge: str) -> T:
        """Returns the result of `work`, or raises its error. `judge`: its name, for errors. Raises
        JudgementOverran if it was at work too long, and JudgementLost."""
        if self.stuck >= MAX_STUCK:
            raise JudgementLost(f"{judge} is not called: {self.stuck} earlier calls never returned")
        judged = in_daemon_thread(work, self.limit_s)
        either: list[Future[Any]] = [judged, self._stopped]
        while not judged.done() and not self._stopped.done() and (left_s := judged.clock.left_s) > 0:
            wait(either, max(left_s, SHORTEST_WAIT_S), FIRST_COMPLETED)
        if judged.done():
            try:
                return judged.result()
            except MemoryError as error:
                raise JudgementLost(f"{judge} ran out of memory") from error
        self.stuck += 1
        leave_behind(judged.thread)
        judged.add_done_callback(lambda _: self._returned())
        raise JudgementOverran(f"{judge} did not return within {self.limit_s:g} s")

    def _returned(self) -> None:
        self.stuck -= 1

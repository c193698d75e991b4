"""Work that may never end, in a thread that keeps nobody from leaving.

timed_threads.py, conversations.py, validation.py, hub.py -> [in_daemon_thread] -> a Future with a clock
who waits no longer -> task_lock.py leave_behind(its thread): a lock that it holds is free
"""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

from swarmnode.tasks.deadlines.work_clock import WorkClock, on_the_clock

T = TypeVar("T")

SHORTEST_WAIT_S = 0.01
"""Shortest wait for the work, in seconds: a clock that stands still may have next to nothing left."""


class ThreadWork(Future[T]):
    """The future of work that runs in a thread of its own."""

    def __init__(self, clock: WorkClock | None = None) -> None:
        super().__init__()
        self.thread: threading.Thread | None = None
        self.clock = clock or WorkClock()


def in_daemon_thread(
    work: Callable[[], T], limit_s: float = math.inf, now: Callable[[], float] = time.monotonic
) -> ThreadWork[T]:
    """Starts `work` in a thread that never holds up the exit of the process, as those of an executor would.
    `limit_s`: how long its caller lets it be at work, by the clock `now`.

    A thread cannot be ended: one that overruns is left behind. What work raises is the result's exception; an
    attempt to end the process (sys.exit) is a RuntimeError. The work has the caller's context variables, so
    that what it logs is said in the name of the caller's policy.
    """
    judged = ThreadWork[T](WorkClock(limit_s, now))
    judged.set_running_or_notify_cancel()

    def judge() -> None:
        on_the_clock(judged.clock)
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001  carried to whoever waits, who logs it
            # An asyncio.Future cannot hold a StopIteration.
            ours = isinstance(error, Exception) and not isinstance(error, StopIteration)
            judged.set_exception(error if ours else RuntimeError(f"the judge raised {error!r}"))
        else:
            judged.set_result(value)

    judged.thread = threading.Thread(target=copy_context().run, args=(judge,), name="judge", daemon=True)
    judged.thread.start()
    return judged

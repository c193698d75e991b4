"""Work that may never end, in a thread that does not keep the process from exiting.

timed_threads.py, conversations.py, judge.py, hub_access.py, worker_pool.py
        -> [in_daemon_thread] -> a Future with a clock
who waits no longer -> task_lock.py leave_behind(its thread): a lock that it holds is free
"""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from queue import SimpleQueue
from typing import TypeVar

from swarmnode.tasks.deadlines.work_clock import WorkClock, on_the_clock

T = TypeVar("T")

SHORTEST_WAIT_S = 0.01
"""Shortest wait for the work, in seconds: a clock that is stopped may have almost nothing left."""


class ThreadWork(Future[T]):
    """The future of work that runs in a thread of its own."""

    def __init__(self, clock: WorkClock | None = None) -> None:
        super().__init__()
        self.thread: threading.Thread | None = None
        self.clock = clock or WorkClock()


def in_daemon_thread(
    work: Callable[[], T], limit_s: float = math.inf, now: Callable[[], float] = time.monotonic
) -> ThreadWork[T]:
    """Starts `work` in a thread that never delays the exit of the process, unlike those of an executor.
    `limit_s`: how long it may be at work, by the clock `now`.

    A thread cannot be ended: one that overruns is left behind. An error of the work is the result's
    exception; an attempt to end the process (sys.exit) is a RuntimeError. The work has the caller's context
    variables, so that its log lines name the caller's policy.
    """
    judged = ThreadWork[T](WorkClock(limit_s, now))
    judged.set_running_or_notify_cancel()
    judged.thread = _daemon(lambda: _settle(judged, work))
    return judged


class DaemonThread:
    """A thread that does one piece of work after another, for objects that must stay in the thread that made
    them, such as connections of sqlite3. It does not keep the process from exiting."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = _daemon(self._serve)

    def do(self, work: Callable[[], T]) -> ThreadWork[T]:
        """Lets the thread do `work` after everything requested earlier, as `in_daemon_thread` would."""
        wanted = ThreadWork[T]()
        wanted.set_running_or_notify_cancel()
        wanted.thread = self._thread
        self._asked.put(lambda: _settle(wanted, work))
        return wanted

    def end(self) -> None:
        """Ends the thread after its last piece of work."""
        self._asked.put(None)

    def _serve(self) -> None:
        while (work := self._asked.get()) is not None:
            work()


def _daemon(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=copy_context().run, args=(target,), name="judge", daemon=True)
    thread.start()
    return thread


def _settle(wanted: ThreadWork[T], work: Callable[[], T]) -> None:
    """Does the work on the clock of its future, and stores its value or its error there."""
    on_the_clock(wanted.clock)
    try:
        value = work()
    except BaseException as error:  # noqa: BLE001  carried to whoever waits, who logs it
        # An asyncio.Future cannot hold a StopIteration.
        ours = isinstance(error, Exception) and not isinstance(error, StopIteration)
        wanted.set_exception(error if ours else RuntimeError(f"the judge raised {error!r}"))
    else:
        wanted.set_result(value)

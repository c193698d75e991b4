"""The lock that lets one thread at a time run the code of task files.

learner's thread, judge's thread -> [TaskLock] -> examples(seed), reward(...) of a script's functions
"""

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from weakref import WeakSet

from swarmnode.errors import JudgementAbandoned
from swarmnode.tasks.deadlines.work_clock import off_the_clock

logger = logging.getLogger(__name__)


PATIENCE_S = 60.0
"""Longest call in seconds while another one waits; after that it counts as hung. An answer that hangs a
reward costs the learner no more than this. The exchange gives up sooner
(ExchangeSettings.score_timeout_s)."""


class TaskLock:
    """A fair, reentrant lock that does not wait for ever. A thread cannot be killed, so one that hangs inside
    is left behind, and the others continue without it: at once if nobody waits for its work any more, else
    when their patience ends."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._next = threading.Lock()
        self._changed = threading.Condition()
        self._holder: threading.Thread | None = None
        self._left_behind = WeakSet[threading.Thread]()

    @contextmanager
    def taken(self) -> Generator[None, None, None]:
        """Holds the lock for the length of a `with` block."""
        thread = threading.current_thread()
        if self._holder is thread:
            yield
            return
        with off_the_clock():
            self._wait(thread)
        try:
            yield
        finally:
            self._give_back(thread)

    def leave_behind(self, thread: threading.Thread) -> None:
        """Gives up the work of a thread: it blocks no others, and cannot enter again."""
        with self._changed:
            self._left_behind.add(thread)
            self._changed.notify_all()
        self._give_back(thread)

    def _wait(self, thread: threading.Thread) -> None:
        # The waiting thread holds `_next`: one that returns at once queues behind it.
        with self._next, self._changed:
            if not self._changed.wait_for(
                lambda: self._holder is None or thread in self._left_behind, self._patience_s
            ):
                logger.warning("a task has been busy for over %g s; continuing without it", self._patience_s)
            if thread in self._left_behind:
                raise JudgementAbandoned("this judgement is no longer needed")
            self._holder = thread

    def _give_back(self, thread: threading.Thread) -> None:
        with self._changed:
            if self._holder is thread:
                self._holder = None
                self._changed.notify_all()


TASK_LOCK = TaskLock()
"""Lock of all tasks in this process: they share one `random`."""


def leave_behind(thread: threading.Thread | None) -> None:
    """Lets the tasks of this process continue without a thread that overran. None: there was none."""
    if thread is not None:
        TASK_LOCK.leave_behind(thread)

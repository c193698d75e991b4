"""Work that may never end, in a thread that keeps nobody from leaving.

judged.py, exchange/validation.py, hub.py, model/hub.py -> [in_daemon_thread] -> a Future with a deadline
who waits no longer -> loader.py leave_behind(its thread): a lock that it holds is free
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


class ThreadWork(Future[T]):
    """What becomes of work in a thread of its own."""

    thread: threading.Thread | None = None


def in_daemon_thread(work: Callable[[], T]) -> ThreadWork[T]:
    """Start `work` in a thread that never holds up the exit of the process, as those of an executor would.

    A thread cannot be ended: one that overruns is left behind. What work raises is the result's exception; an
    attempt to end the process (sys.exit) is a RuntimeError. The work has the caller's context variables, so
    that what it logs is said in the name of the caller's policy.
    """
    judged = ThreadWork[T]()
    judged.set_running_or_notify_cancel()

    def judge() -> None:
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

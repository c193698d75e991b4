"""SIGINT, SIGTERM and SIGHUP of a process that runs a node. Once: stop in order; again: stop at once.

`join`, `seed` -> [STOP_SIGNALS] -> `check` between the parts of a start
                                 -> `hand_to` -> NodeLoop.request_stop, once an event loop runs

A separate thread receives them, whatever the main thread does. Nothing is raised where a signal arrives:
Python ignores errors in a `__del__`, and a library would take one for its own. A model that takes minutes to
load in C code does not keep a second signal from ending the process.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from swarmnode.errors import INTERRUPTED, StoppedEarly

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAME_REQUEST_S = 1.0
"""Signals this close together are one request: a terminal and a supervisor often both send one."""

STOPPING = "stopping: finishing current work and writing a checkpoint"
STOPPING_EARLY = "stopping once the current loading step is done"
ENDED_EARLY = "stopped before the node had started"
ENDED_AT_ONCE = "stopped immediately"
RESUMED = "; the next start resumes from the last checkpoint"


class StopSignals:
    """`with STOP_SIGNALS: ...` in the main thread, around everything that a node's process does."""

    def __init__(self, end: Callable[[int], None] = os._exit, clock: Callable[[], float] = time.monotonic):
        """`end`: ends the process with this exit code."""
        self._end, self._clock = end, clock
        self._lock = threading.Lock()
        self._asked_at: float | None = None
        self._request_stop: Callable[[], None] | None = None
        """Passes a request to the running node. None: it has not started yet."""
        self._stopping = STOPPING_EARLY

    def __enter__(self) -> Self:
        self._asked_at = self._request_stop = None
        self._stopping = STOPPING_EARLY
        heard, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        self._woke_before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._before = [(number, signal.signal(number, _leave_to_the_thread)) for number in SIGNALS]
        self._thread = threading.Thread(target=self._listen, args=(heard,), name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before:
            signal.signal(number, before)
        signal.set_wakeup_fd(self._woke_before)
        os.close(self._wakes)
        self._thread.join()

    def check(self) -> None:
        """Raises StoppedEarly if the process was asked to stop, so that its start goes no further."""
        if self._asked_at is not None:
            raise StoppedEarly(ENDED_EARLY, hint="nothing was lost")

    def hand_to(self, request_stop: Callable[[], None], stopping: str = STOPPING) -> None:
        """Send requests to `request_stop` on the running event loop from now on; an earlier request is sent
        at once. `stopping`: the log line for it."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._request_stop, self._stopping = lambda: _call(loop, request_stop), stopping
            asked = self._asked_at is not None
        if asked:
            request_stop()

    def _listen(self, heard: int) -> None:
        with open(heard, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in SIGNALS:
                    self._hear()

    def _hear(self) -> None:
        with self._lock:
            first, now = self._asked_at, self._clock()
            if first is None:
                self._asked_at = now
            request_stop, stopping = self._request_stop, self._stopping
        if first is None:
            if request_stop is not None:
                request_stop()
            logger.info("%s; press Ctrl-C again to stop immediately", stopping)
        elif now - first > SAME_REQUEST_S:
            # The current work may take minutes. The network daemon ends with us.
            try:
                ended = ENDED_EARLY if request_stop is None else ENDED_AT_ONCE
                logger.warning("%s%s", ended, RESUMED if stopping == STOPPING else "")
                logging.shutdown()
                sys.stdout.flush()
            finally:  # Also if nothing can be written any more.
                self._end(INTERRUPTED)


STOP_SIGNALS = StopSignals()
"""The instance of this process. Without `with` it receives nothing, as when another program runs the node."""


def _leave_to_the_thread(number: int, frame: object) -> None:
    """Does nothing, since Python has notified the thread already."""


def _call(loop: asyncio.AbstractEventLoop, request_stop: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # The loop has ended, and so has the node.
        loop.call_soon_threadsafe(request_stop)

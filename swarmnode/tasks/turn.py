"""One thread at a time in the code of task files.

learner's thread, judge's thread -> [Turn] -> examples(seed), reward(...) of a file

Whoever writes a task thinks of one thread, and rightly so: `random.seed(seed)`, a parser kept at the top of
the file, a connection. But a node draws and scores its own rollouts while it judges those of others.
"""

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""A call that lasts longer while another waits is taken for hung: an answer that hangs a reward costs the
learner this much and no more. The exchange gives up sooner (ExchangeSettings.score_timeout_s)."""


@dataclass(slots=True)
class _Holder:
    """The lock that the present holder has to give back."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: int | None = None


class Turn:
    """A lock that is fair, that its holder may take again, and that does not wait for ever.

    A thread cannot be killed. One that hangs inside is left behind, and the others go on without it.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._next = threading.Lock()
        self._holder = _Holder()

    @contextmanager
    def taken(self) -> Generator[None, None, None]:
        """Be the only thread in here, for the length of a `with` block."""
        if self._holder.thread == threading.get_ident():
            yield
            return
        holder = self._wait()
        try:
            yield
        finally:
            holder.thread = None
            holder.lock.release()

    def _wait(self) -> _Holder:
        # Whoever waits holds `_next`: a thread that comes back at once queues behind it.
        with self._next:
            if not self._holder.lock.acquire(timeout=self._patience_s):
                logger.warning(
                    "a task has been busy for over %g s; going on without waiting", self._patience_s
                )
                self._holder = _Holder()
                self._holder.lock.acquire()
            self._holder.thread = threading.get_ident()
            return self._holder

"""A lock that is granted in order of arrival.

threads of several policies -> [FairLock] -> shared_engine.py, one engine

A plain lock would not do: a thread that steps an engine in a loop would take it again before any other has
woken up. Waking up takes milliseconds on a busy machine, during which nobody steps, so short jobs are left to
the holder.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Condition
from types import TracebackType
from typing import TypeVar

from swarmnode.errors import EngineError

T = TypeVar("T")
"""The return type of a job."""

LONGEST_TURN_S = 900.0
"""The longest turn in seconds: one step of a large model takes seconds, loading it minutes."""


class FairLock:
    """A lock that is granted in order of arrival. `with turns: ...` raises EngineError if an earlier holder
    never ends.

    >>> turns = FairLock()
    >>> with turns: 1 + 1
    2
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._line: deque[object] = deque()
        """The holder of the turn, and the threads waiting behind it."""
        self._jobs: deque[Callable[[], None]] = deque()
        """Jobs left to the holder of the turn."""

    @property
    def waiting(self) -> int:
        """Number of threads waiting for their turn."""
        return max(0, len(self._line) - 1)

    @property
    def taken(self) -> bool:
        """True while a thread has the turn."""
        return bool(self._line)

    def do(self, job: Callable[[], T]) -> T:
        """Returns the result of a short `job`, or raises its error. The holder of the turn runs it at the end
        of that turn; without a holder it runs here."""
        done: Future[T] = Future()
        with self._changed:
            if left := self.taken:
                self._jobs.append(partial(_do, job, done))
        if not left:
            with self:
                return job()
        try:
            return done.result(LONGEST_TURN_S)
        except TimeoutError:
            raise _never_ends() from None

    def __enter__(self) -> None:
        ticket = object()
        with self._changed:
            self._line.append(ticket)
            while self._line[0] is not ticket:
                first = self._line[0]
                # The line moves at every turn; a wait fails only if one turn never ends.
                if not self._changed.wait(LONGEST_TURN_S) and self._line[0] is first:
                    self._line.remove(ticket)
                    raise _never_ends()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._line.popleft()
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            job()


def _do(job: Callable[[], T], done: "Future[T]") -> None:
    try:
        done.set_result(job())
    except BaseException as error:  # noqa: BLE001  it is raised where the job was left
        done.set_exception(error)


def _never_ends() -> EngineError:
    return EngineError(
        f"the rollout engine has not answered for {LONGEST_TURN_S:.0f} s",
        hint="see the log, then restart the node; it resumes from the last checkpoint",
    )

"""One thread at a time, in the order in which they came.

threads of several policies -> [FairLock] -> shared_engine.py, one engine

A plain lock would not do: whoever steps an engine in a loop takes it again before anybody else has woken up.
"""

from collections import deque
from threading import Condition
from types import TracebackType

from swarmnode.errors import EngineError

LONGEST_TURN_S = 900.0
"""Longest turn in seconds: one step of a large model takes seconds, loading it minutes."""


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
        """Whose turn it is, and those who wait behind."""

    @property
    def waiting(self) -> int:
        """Number of threads that wait for their turn."""
        return max(0, len(self._line) - 1)

    def __enter__(self) -> None:
        ticket = object()
        with self._changed:
            self._line.append(ticket)
            while self._line[0] is not ticket:
                first = self._line[0]
                # The line moves at every turn; only one that never ends is waited for in vain.
                if not self._changed.wait(LONGEST_TURN_S) and self._line[0] is first:
                    self._line.remove(ticket)
                    raise EngineError(
                        f"the rollout engine has not answered for {LONGEST_TURN_S:.0f} s",
                        hint="see the log; start again, the last checkpoint is where it goes on",
                    )

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        with self._changed:
            self._line.popleft()
            self._changed.notify_all()

"""Brings the trainers of several policies together, so that all of them learn in one batch.

learner of policy 0 --+
                      +--> [Cohort] -> train_together, in the thread of whoever came last
learner of policy 1 --+

Nobody has to come: the others do not wait for a member that has left, and wait for a late one for at most
`patience_s`; it then trains at the next meeting. Two meetings never overlap, because the policies share one
model.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Condition
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Work = TypeVar("Work")
Result = TypeVar("Result")

PATIENCE_S = 30.0
"""The longest wait for late members, which may be evaluating, waiting for peers, or generating longer
answers."""


@dataclass(slots=True, eq=False)
class _Meeting(Generic[Work, Result]):
    """One joint training, with the members that take part."""

    works: dict[str, Work] = field(default_factory=dict[str, Work])
    results: dict[str, Result] = field(default_factory=dict[str, Result])
    error: BaseException | None = None
    begun: bool = False
    over: bool = False


class Cohort(Generic[Work, Result]):
    """Trains the members that have come together, each calling from its own thread.

    >>> cohort = Cohort(["policy-0"], run=lambda works: [work + 1 for work in works])
    >>> cohort.train("policy-0", 41)
    42
    """

    def __init__(
        self,
        members: Iterable[str],
        run: Callable[[list[Work]], Sequence[Result]],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`run` gets the work of the members that came, in the order of `members`, and returns as many
        results."""
        self.missed: Counter[str] = Counter()
        """Number of meetings that began without a member that had not left, by member."""
        self._members = list(members)
        self._order = tuple(self._members)
        self._run = run
        self._context = copy_context()
        """The context of the cohort's creator. Joint work runs in it: its log lines are about no single
        member."""
        self._patience_s = patience_s
        self._changed = Condition()
        self._next: _Meeting[Work, Result] = _Meeting()
        self._busy = False
        """True while a meeting is running."""

    @property
    def present(self) -> tuple[str, ...]:
        """Members that have come to the next meeting."""
        return tuple(self._next.works)

    def train(self, member: str, work: Work) -> Result:
        """Meets the others and returns this member's result. Raises what the joint run raised, for all
        members that took part, and ValueError if the member has left or is here already."""
        with self._changed:
            if member not in self._members or member in self._next.works:
                raise ValueError(f"{member} is not a member of this cohort, or has already joined")
            meeting = self._next
            meeting.works[member] = work
            self._changed.notify_all()
            leads = self._wait_to_begin(meeting)
        if leads:
            self._hold(meeting)
        if meeting.error is not None:
            raise meeting.error
        return meeting.results[member]

    def leave(self, member: str) -> None:
        """Removes a member that nobody should wait for any more; waiting members continue. Calling it twice
        is fine."""
        with self._changed:
            if member in self._members:
                self._members.remove(member)
                if late := self.missed[member]:
                    logger.info("%s was late for %d joint training rounds", member, late)
            self._changed.notify_all()

    def _wait_to_begin(self, meeting: _Meeting[Work, Result]) -> bool:
        """Waits until this meeting may begin, and returns True if this member leads it; returns False once
        another member has held it."""
        free_since: float | None = None
        while not meeting.over:
            if meeting.begun or self._busy:
                # Waits as long as training takes: it always ends, if need be with an error.
                free_since = None
                self._changed.wait()
                continue
            if free_since is None:
                free_since = time.monotonic()
            left_s = free_since + self._patience_s - time.monotonic()
            missing = [member for member in self._members if member not in meeting.works]
            if not missing or left_s <= 0:
                self._begin(meeting, missing)
                return True
            self._changed.wait(left_s)
        return False

    def _begin(self, meeting: _Meeting[Work, Result], missing: Sequence[str]) -> None:
        if missing:
            self.missed.update(missing)
            self._context.copy().run(
                logger.info,
                "training %s without %s, not ready after %.0f s",
                ", ".join(sorted(meeting.works)),
                ", ".join(missing),
                self._patience_s,
            )
        meeting.begun = self._busy = True
        self._next = _Meeting()

    def _hold(self, meeting: _Meeting[Work, Result]) -> None:
        try:
            # Always in the same order: a sum over members must not depend on which was faster.
            names = sorted(meeting.works, key=self._order.index)
            works = [meeting.works[name] for name in names]
            results = self._context.copy().run(self._run, works)
            meeting.results = dict(zip(names, results, strict=True))
        except BaseException as error:
            meeting.error = error  # for all other members that took part
            raise
        finally:
            with self._changed:
                meeting.over = True
                self._busy = False
                self._changed.notify_all()

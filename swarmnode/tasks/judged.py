"""How a node judges its own rollouts: with a deadline, whatever the judge does, and with patience for a few.

task, example, completions -> [OwnJudge: JudgedTask.score] -> rewards, or none where the judge was lost

A judgement that overran has no reward: unknown, and not zero. One such group is a line in the log. A task
that loses several in a row is left aside while others go on; where none is left, the run ends with an error,
and with the checkpoint of what was learnt.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmnode.errors import JudgementLost, JudgementOverran, TaskError
from swarmnode.tasks.builtin import ProceduralTask
from swarmnode.tasks.task import Isolated, Task
from swarmnode.types import Example

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOST_IN_A_ROW = 3
"""One answer may hang a judge; three groups one after the other are the judge's own fault."""

REST_S = 600.0
"""So long a task that lost so many is not judged; then one group is tried."""

MAX_STUCK = 4
"""Threads that overran and cannot be ended. With more, nothing is judged in a thread until one returns."""

ADVICE = "`swarmnode task check` tells which function; --set tasks.score_timeout_s=SECONDS gives it more time"


@dataclass(slots=True)
class Patience:
    """How often judging one task failed in a row, and until when it rests."""

    lost: int = 0
    rests_until: float = 0.0

    def after_loss(self, now: float) -> "Patience":
        lost = self.lost + 1
        return Patience(lost, now + REST_S if lost >= LOST_IN_A_ROW else 0.0)

    def rests(self, now: float) -> bool:
        return now < self.rests_until


class OwnJudge:
    """The tasks of one policy as its learner sees them. `tasks` score with a deadline and raise TaskError
    only where a task is broken, or none is left."""

    def __init__(
        self, tasks: Mapping[str, Task], timeout_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s = timeout_s
        self.lost = 0
        """Groups that have no reward because their judgement was lost."""
        self.stopped: Future[None] = Future()
        self.stuck = 0
        self._clock = clock
        self._patience = {name: Patience() for name in tasks}
        self._told: set[str] = set()
        self.tasks: Mapping[str, Task] = {name: JudgedTask(task, self) for name, task in tasks.items()}

    def stop(self) -> None:
        """Let every judgement return at once, for good. Thread-safe."""
        if not self.stopped.done():
            self.stopped.set_result(None)
        for task in self.tasks.values():
            assert isinstance(task, JudgedTask)
            task.interrupt()

    def rests(self, name: str) -> bool:
        return self._patience[name].rests(self._clock())

    def was_judged(self, name: str) -> None:
        if self._patience[name].lost:
            self._patience[name] = Patience()
            logger.info("task %s is judged again", name)

    def was_lost(self, name: str, lost: JudgementLost) -> None:
        """Count it and tell of it once. Raises TaskError where no task is left to judge."""
        if self.stopped.done():
            return
        self.lost += 1
        now = self._clock()
        before = self._patience[name]
        after = self._patience[name] = before.after_loss(now)
        if name not in self._told:
            self._told.add(name)
            logger.warning("%s: these answers have no reward. %s", lost, ADVICE)
        if not after.rests(now):
            return
        if all(patience.rests(now) for patience in self._patience.values()):
            which = "the only task" if len(self._patience) == 1 else "the last task that was left"
            raise TaskError(
                f"{which} was given up after {after.lost} groups without a reward: {lost.message}",
                hint=f"{lost.hint}; {ADVICE}" if lost.hint else ADVICE,
            ) from lost
        if before.lost < LOST_IN_A_ROW:
            logger.warning(
                "task %s is left aside after %d groups without a reward, and tried again every %.0f minutes;"
                " the other tasks go on",
                name,
                after.lost,
                REST_S / 60,
            )


class JudgedTask:
    """A task of one's own policy. Answers whose judgement is lost have no reward."""

    def __init__(self, task: Task, judge: OwnJudge) -> None:
        self.task = task
        self.name = task.name
        self.version = task.version
        self._judge = judge

    def examples(self, seed: int) -> Iterator[Example]:
        """Raises JudgementLost once the judge is stopped: whoever draws for a round may be told to end."""
        for example in self.task.examples(seed):
            if self._judge.stopped.done():
                raise JudgementLost("the node is stopping")
            yield example

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """Raises TaskError for a broken task."""
        unscored: list[Mapping[str, float | None]] = [{} for _ in completions]
        if self._judge.stopped.done():
            return unscored
        if self._judge.rests(self.name):
            self._judge.lost += 1
            return unscored
        try:
            scores = self._scored(example, completions)
        except JudgementLost as lost:
            self._judge.was_lost(self.name, lost)
            return unscored
        self._judge.was_judged(self.name)
        return scores

    def interrupt(self) -> None:
        if isinstance(self.task, Isolated):
            self.task.interrupt()

    def _scored(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        # Built-in tasks end by themselves, and an isolated one has its deadline.
        if isinstance(self.task, ProceduralTask | Isolated):
            return self.task.score(example, completions)
        return self._scored_in_thread(lambda: self.task.score(example, completions))

    def _scored_in_thread(self, work: Callable[[], T]) -> T:
        judge = self._judge
        if judge.stuck >= MAX_STUCK:
            raise JudgementLost(f"{judge.stuck} judgements never ended")
        judged = in_daemon_thread(work)
        either: list[Future[Any]] = [judged, judge.stopped]
        wait(either, judge.timeout_s, FIRST_COMPLETED)
        if judged.done():
            return judged.result()
        judge.stuck += 1
        judged.add_done_callback(lambda _: self._returned())
        raise JudgementOverran(f"the reward of task {self.name} did not return within {judge.timeout_s:g} s")

    def _returned(self) -> None:
        self._judge.stuck -= 1


def in_daemon_thread(work: Callable[[], T]) -> "Future[T]":
    """Start `work` in a thread that never holds up the exit of the process, as those of an executor would.

    A thread cannot be ended: one that overruns is left behind. What work raises is the result's exception; an
    attempt to end the process (sys.exit) is a RuntimeError. The work has the caller's context variables, so
    that what it logs is said in the name of the caller's policy.
    """
    judged: Future[T] = Future()
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

    threading.Thread(target=copy_context().run, args=(judge,), name="judge", daemon=True).start()
    return judged

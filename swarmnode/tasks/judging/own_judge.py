"""The tasks as a learner uses them: every judgement of its rollouts has a deadline.

task, example, completions -> [OwnJudge: JudgedTask.score] -> rewards, or none where the judge was lost

A node judges its own rollouts with a deadline, whatever the judge does. One rule covers a reward that raises,
overruns or ends its process: the group has no reward (unknown, not zero), and the log says so. After
tasks.max_failures such groups of a task in a row, the run ends with an error that says where, and with a
checkpoint of what was learnt. A reward that raises before it has ever judged a group is broken and ends the
run at once; one that overran may just have met a bad answer.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, TypeVar

from swarmnode.chat import Message, Said, Turn
from swarmnode.errors import (
    JudgementAbandoned,
    JudgementLost,
    JudgementOverran,
    SwarmnodeError,
    TaskError,
    notes_of,
)
from swarmnode.tasks.builtin import BuiltinTask
from swarmnode.tasks.deadlines.daemon_threads import DaemonThread
from swarmnode.tasks.deadlines.task_lock import leave_behind
from swarmnode.tasks.deadlines.timed_threads import TimedThreads
from swarmnode.tasks.source_file import of_theirs
from swarmnode.tasks.task import Environment, Isolated, Task, TaskAround, is_environment, score_strictly
from swarmnode.types import Example, Scores

T = TypeVar("T")

logger = logging.getLogger(__name__)


MORE_TIME = "--set tasks.score_timeout_s=SECONDS gives it more time"
ADVICE = "`swarmnode task check` shows which function"


class OwnJudge:
    """The tasks of one policy as its learner sees them. `tasks` score with a deadline, from any number of
    threads, and raise TaskError only if one is broken."""

    def __init__(self, tasks: Mapping[str, Task], timeout_s: float, *, max_failures: int = 3) -> None:
        """`max_failures`: failures of one task in a row, the last of which raises an error."""
        self.timeout_s = timeout_s
        self.lost = 0
        """Groups without a reward because their judge failed."""
        self.failure = ""
        """Message of the last of these failures. Empty: there was none."""
        self.stopped: Future[None] = Future()
        self.threads = TimedThreads(timeout_s, self.stopped)
        self.asking: set[threading.Thread] = set()
        """Threads that ask an environment now: one that hangs keeps all others out of the tasks."""
        self._max_failures = max_failures
        self._in_a_row: Counter[str] = Counter()
        self._has_judged: set[str] = set()
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self.tasks: Mapping[str, Task] = {
            name: JudgedEnvironment(task, self) if is_environment(task) else JudgedTask(task, self)
            for name, task in tasks.items()
        }
        self._isolated = [task for task in tasks.values() if isinstance(task, Isolated)]
        self.width = sum(task.workers for task in self._isolated) + (len(self._isolated) < len(tasks))
        """Groups that can be judged at the same time."""

    def stop(self) -> None:
        """Makes every judgement return at once, permanently. Thread-safe."""
        if not self.stopped.done():
            self.stopped.set_result(None)
        for thread in list(self.asking):
            leave_behind(thread)
        for task in self._isolated:
            task.interrupt()

    def goes_on(self) -> None:
        """Raises JudgementLost once the judge is stopped."""
        if self.stopped.done():
            raise JudgementLost("the node is stopping")

    def was_judged(self, name: str) -> None:
        with self._lock:
            self._has_judged.add(name)
            self._in_a_row[name] = 0

    def has_judged(self, name: str) -> bool:
        """Returns True if this task has ever judged anything."""
        return name in self._has_judged

    def record_failure(self, name: str, error: JudgementLost | TaskError) -> None:
        """Counts a failure and logs it. Raises TaskError at the last one that is tolerated."""
        if self.stopped.done():
            return
        with self._lock:
            self.lost, self.failure = self.lost + 1, error.message
            self._in_a_row[name] += 1
            in_a_row = self._in_a_row[name]
            first, broken = name not in self._told, name not in self._has_judged
            self._told.add(name)
        if isinstance(error, TaskError) and broken:
            raise error
        if in_a_row >= self._max_failures:
            raise given_up(name, in_a_row, error) from error
        if first:
            where = "".join(f"\n{note}" for note in notes_of(error))
            logger.warning("%s; these answers get no reward. %s%s", error, _advice(error), where)
        else:
            logger.info("task %s failed on another group: %s", name, error.message)


def given_up(name: str, failures: int, error: JudgementLost | TaskError) -> TaskError:
    """Returns the error that ends the run, with the traceback of the last failure."""
    several = "a group" if failures == 1 else f"{failures} groups in a row"
    hint = f"{error.hint}; {_advice(error)}" if error.hint else _advice(error)
    ending = TaskError(
        f"task {name} was given up after {several} without a reward: {error.message}", hint=hint
    )
    for note in notes_of(error):
        ending.add_note(note)
    return ending


def _advice(error: SwarmnodeError) -> str:
    return f"{ADVICE}; {MORE_TIME}" if isinstance(error, JudgementOverran) else ADVICE


class JudgedTask(TaskAround):
    """A task of the node's own policy. Answers whose judgement is lost have no reward."""

    def __init__(self, task: Task, judge: OwnJudge) -> None:
        self.task = task
        self.version = task.version
        self._judge = judge
        self._one_at_a_time = threading.Lock()
        """Authors of tasks for this process expect a single thread that judges our own rollouts."""

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields the task's examples. Raises JudgementLost once the judge is stopped, so that a round can end
        while it draws."""
        if isinstance(self.task, BuiltinTask | Isolated):
            for example in self.task.examples(seed):
                self._judge.goes_on()
                yield example
            return
        thread = DaemonThread()
        try:
            examples = self._done(thread, lambda: iter(self.task.examples(seed)))
            while (example := self._done(thread, partial(next, examples, None))) is not None:
                yield example
        finally:
            thread.end()

    def score(self, example: Example, completions: Sequence[Said]) -> list[Mapping[str, float | None]]:
        """Returns the scores. Raises TaskError if the task is broken."""
        unscored: list[Mapping[str, float | None]] = [{} for _ in completions]
        if self._judge.stopped.done():
            return unscored
        try:
            scores = self._scored(example, completions)
        except (JudgementLost, TaskError) as error:
            self._judge.record_failure(self.name, error)
            return unscored
        self._judge.was_judged(self.name)
        return list(scores)

    def _done(self, thread: DaemonThread, work: Callable[[], T]) -> T:
        """Returns the result of the work in that thread. Raises JudgementLost once the judge is stopped."""
        self._judge.goes_on()
        done = thread.do(work)
        either: list[Future[Any]] = [done, self._judge.stopped]
        wait(either, return_when=FIRST_COMPLETED)
        if not done.done():
            leave_behind(done.thread)
        self._judge.goes_on()
        return done.result()

    def _scored(self, example: Example, completions: Sequence[Said]) -> tuple[Scores, ...]:
        judge = partial(score_strictly, self.task, example, completions)
        # Built-in tasks end by themselves, and an isolated task has its own deadline.
        if isinstance(self.task, BuiltinTask | Isolated):
            return judge()
        with self._one_at_a_time:
            return self._judge.threads.result_of(
                lambda: of_theirs(f"{self._rewards} failed", judge), self._rewards
            )

    @property
    def _rewards(self) -> str:
        """Returns the judge's name for messages, with the names of its functions."""
        names = ", ".join(getattr(self.task, "rewards", ()))
        return f"the reward {names} of task {self.name}" if names else f"the reward of task {self.name}"


class JudgedEnvironment(JudgedTask):
    """A judged task that answers back. Its `observe` has no deadline here: the caller sets one."""

    def __init__(self, task: Environment, judge: OwnJudge) -> None:
        super().__init__(task, judge)
        self.most_turns = task.most_turns
        self.failure: JudgementLost | TaskError = JudgementLost(
            f"the environment {self.name} did not answer its turns in time",
            hint="--set tasks.turn_timeout_s=SECONDS gives each turn more time",
        )
        """The last failure of a turn."""
        self._observe = task.observe

    def observe(self, example: Example, turns: Sequence[Turn]) -> tuple[Message, ...] | None:
        """Returns the environment's answer. Raises JudgementLost if it fails or the judge is stopped, and
        TaskError if it fails before it ever judged anything."""
        thread = threading.current_thread()
        self._judge.asking.add(thread)
        try:
            self._judge.goes_on()
            return of_theirs(f"observe() of {self.name} failed", lambda: self._observe(example, turns))
        except JudgementAbandoned:
            raise
        except (JudgementLost, TaskError) as error:
            self.failure = error
            if isinstance(error, JudgementLost) or not self._judge.has_judged(self.name):
                raise
            raise JudgementLost(error.message, hint=error.hint) from error
        finally:
            self._judge.asking.discard(thread)

    def broke_off(self) -> None:
        """Counts an example whose conversations have all broken off. Raises TaskError after too many."""
        self._judge.record_failure(self.name, self.failure)

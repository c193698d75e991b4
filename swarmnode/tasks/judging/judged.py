"""The tasks as a learner uses them: its rollouts judged with a deadline, and the examples of its rounds.

task, example, completions -> [OwnJudge: JudgedTask.score] -> rewards, or none where the judge was lost
tasks -> [draw_round] -> one round of examples, or [ExampleStream], round after round ---------+-> rollout
Node (what others ask help with) -> [WantedExamples], between those of the stream -------------+

A node judges its own rollouts with a deadline, whatever the judge does. There is one rule for a reward that
raises, overruns or ends its process: the group has no reward (unknown, and not zero), which is a line in the
log, and so many groups of a task one after the other (tasks.max_failures) end the run, with an error that
says where and a checkpoint of what was learnt. A reward that raises before it ever judged a group is broken
and ends the run at once; one that overran may have met a bad answer.

A round trains on a fair share of every task, fresh each round, cheap to draw again. The draw is pure: the
same node seed and round give the same examples, so a node that resumes goes on where it was. Every round has
a seed of its own, and examples come from the beginning of it, so that a stranger who draws one again needs a
handful of draws and not thousands.

Strangers choose what they ask for help with (exchange/gossip/helping.py), so such examples are at most every
second one that we answer, and each is answered once.
"""

import hashlib
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from swarmnode.errors import (
    JudgementAbandoned,
    JudgementLost,
    JudgementOverran,
    SwarmnodeError,
    TaskError,
    notes_of,
)
from swarmnode.tasks.builtin import BuiltinTask
from swarmnode.tasks.deadlines.timed_threads import TimedThreads
from swarmnode.tasks.judging.rewards import Reward
from swarmnode.tasks.task import (
    MAX_SEED,
    Environment,
    Isolated,
    Task,
    draw_train,
    evaluation_size_of,
    is_environment,
    is_exchangeable,
    judges_groups,
    levels_of,
    score_strictly,
)
from swarmnode.types import Example, ExampleKey, Message, Scores

if TYPE_CHECKING:
    from swarmnode.chat import Turn

logger = logging.getLogger(__name__)


MORE_TIME = "--set tasks.score_timeout_s=SECONDS gives it more time"
ADVICE = "`swarmnode task check` tells which function"


class OwnJudge:
    """The tasks of one policy as its learner sees them. `tasks` score with a deadline, from any number of
    threads, and raise TaskError only where one is broken."""

    def __init__(self, tasks: Mapping[str, Task], timeout_s: float, *, max_failures: int = 3) -> None:
        """`max_failures`: failures of one task in a row, the last of which raises an error."""
        self.timeout_s = timeout_s
        self.lost = 0
        """Groups that have no reward because their judge failed."""
        self.stopped: Future[None] = Future()
        self.threads = TimedThreads(timeout_s, self.stopped)
        self._max_failures = max_failures
        self._in_a_row: Counter[str] = Counter()
        self._has_judged: set[str] = set()
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self.tasks: Mapping[str, Task] = {name: _judged(task, self) for name, task in tasks.items()}
        processes = [task.workers for task in tasks.values() if isinstance(task, Isolated)]
        self.width = sum(processes) + (len(processes) < len(tasks))
        """Groups that can be judged at the same time."""

    def stop(self) -> None:
        """Makes every judgement return at once, for good. Thread-safe."""
        if not self.stopped.done():
            self.stopped.set_result(None)
        for task in self.tasks.values():
            assert isinstance(task, JudgedTask)
            task.interrupt()

    def was_judged(self, name: str) -> None:
        with self._lock:
            self._has_judged.add(name)
            self._in_a_row[name] = 0

    def has_judged(self, name: str) -> bool:
        """Returns True if this task has ever judged anything."""
        return name in self._has_judged

    def has_failed(self, name: str, error: JudgementLost | TaskError) -> None:
        """Counts a failure and logs it. Raises TaskError at the last one that is tolerated."""
        if self.stopped.done():
            return
        with self._lock:
            self.lost += 1
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
            logger.warning("%s: these answers have no reward. %s%s", error, _advice(error), where)
        else:
            logger.info("task %s failed on a group again: %s", name, error.message)


def given_up(name: str, failures: int, error: JudgementLost | TaskError) -> TaskError:
    """Returns the error that ends the run, with the traceback of the last failure."""
    several = "a group" if failures == 1 else f"{failures} groups one after the other"
    hint = f"{error.hint}; {_advice(error)}" if error.hint else _advice(error)
    ending = TaskError(
        f"task {name} was given up after {several} without a reward: {error.message}", hint=hint
    )
    for note in notes_of(error):
        ending.add_note(note)
    return ending


def _advice(error: SwarmnodeError) -> str:
    return f"{ADVICE}; {MORE_TIME}" if isinstance(error, JudgementOverran) else ADVICE


@runtime_checkable
class HasRewards(Protocol):
    """A task that tells what judges it."""

    @property
    def rewards(self) -> Mapping[str, Reward]: ...


class JudgedTask:
    """A task of one's own policy. Answers whose judgement is lost have no reward."""

    def __init__(self, task: Task, judge: OwnJudge) -> None:
        self.task = task
        self.name = task.name
        self.version = task.version
        self.exchangeable = is_exchangeable(task)
        self.judges_groups = judges_groups(task)
        self.levels = levels_of(task)
        self.evaluation_size = evaluation_size_of(task)
        self._judge = judge
        self._one_at_a_time = threading.Lock()
        """Whoever writes a task for this process thinks of one thread that judges our own rollouts."""

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields the task's examples. Raises JudgementLost once the judge is stopped, since a round that
        draws may be told to end."""
        for example in self.task.examples(seed):
            if self._judge.stopped.done():
                raise JudgementLost("the node is stopping")
            yield example

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """Returns the scores. Raises TaskError if the task is broken."""
        unscored: list[Mapping[str, float | None]] = [{} for _ in completions]
        if self._judge.stopped.done():
            return unscored
        try:
            scores = self._scored(example, completions)
        except (JudgementLost, TaskError) as error:
            self._judge.has_failed(self.name, error)
            return unscored
        self._judge.was_judged(self.name)
        return list(scores)

    def interrupt(self) -> None:
        if isinstance(self.task, Isolated):
            self.task.interrupt()

    def _scored(self, example: Example, completions: Sequence[str]) -> tuple[Scores, ...]:
        judge = partial(score_strictly, self.task, example, completions)
        # Built-in tasks end by themselves, and an isolated one has its deadline.
        if isinstance(self.task, BuiltinTask | Isolated):
            return judge()
        with self._one_at_a_time:
            return self._judge.threads.result_of(judge, self._rewards)

    @property
    def _rewards(self) -> str:
        """Returns who judges, by the names of its functions, for messages."""
        names = ", ".join(self.task.rewards) if isinstance(self.task, HasRewards) else ""
        return f"the reward {names} of task {self.name}" if names else f"the reward of task {self.name}"


class JudgedEnvironment(JudgedTask):
    """A judged task that answers back. Its `observe` has no deadline here: whoever calls it sets one."""

    def __init__(self, task: Environment, judge: OwnJudge) -> None:
        super().__init__(task, judge)
        self.most_turns = task.most_turns
        self.failure: JudgementLost | TaskError = JudgementLost(
            f"the environment {self.name} did not answer its turns in time",
            hint="--set tasks.turn_timeout_s=SECONDS gives each more time",
        )
        """The last one of a turn."""
        self._observe = task.observe

    def observe(self, example: Example, turns: "Sequence[Turn]") -> tuple[Message, ...] | None:
        """Returns the environment's answer. Raises JudgementLost if it fails or the judge is stopped, and
        TaskError if it fails before it ever judged anything."""
        if self._judge.stopped.done():
            raise JudgementLost("the node is stopping")
        try:
            return self._observe(example, turns)
        except JudgementAbandoned:
            raise
        except (JudgementLost, TaskError) as error:
            self.failure = error
            if isinstance(error, JudgementLost) or not self._judge.has_judged(self.name):
                raise
            raise JudgementLost(error.message, hint=error.hint) from error

    def broke_off(self) -> None:
        """Counts an example whose conversations have all broken off. Raises TaskError after too many."""
        self._judge.has_failed(self.name, self.failure)


def _judged(task: Task, judge: OwnJudge) -> JudgedTask:
    return JudgedEnvironment(task, judge) if is_environment(task) else JudgedTask(task, judge)


# ---- the examples of a round ----

MAX_SEEDS_PER_ROUND = 64
"""Most seeds of a finite task read for one round before the task counts as too small."""


def round_seed(node_seed: int, round_index: int, attempt: int = 0) -> int:
    """Returns the seed of one round of one node. Two agree with a chance of one in 2**63.

    >>> round_seed(0, 1) != round_seed(1, 0)
    True
    """
    name = f"{node_seed}/{round_index}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") & MAX_SEED


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """The place of an `ExampleStream`: `taken` of the round's `per_round` examples are gone."""

    round: int = 1
    taken: int = 0
    per_round: int = 0
    levels: Mapping[str, int] = field(default_factory=dict[str, int])
    """Levels that this round was drawn at, by task with a curriculum (curriculum.py)."""


class ExampleStream(Iterator[Example]):
    """The examples of round 1, 2, 3, ... without end. `place` is all that a restart has to know.

    Generation takes from it what it needs: a round that asks for more than its share (partial rollouts do)
    simply begins the next draw earlier. Where the size of a round has changed since, the next one is drawn:
    no example comes twice.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        node_seed: int,
        per_round: int,
        place: StreamPlace | None = None,
        levels: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`levels`: returns the levels that the next drawn round asks at."""
        self._levels = levels
        self._tasks = tasks
        self._node_seed = node_seed
        self._drawn: list[Example] = []
        self.place = StreamPlace(per_round=per_round)
        if place is not None:
            same = place.per_round == per_round
            self.place = place if same else StreamPlace(place.round + 1, 0, per_round)

    def __next__(self) -> Example:
        place = self.place
        if not self._drawn:
            if not place.taken:
                place = self.place = replace(place, levels=dict(self._levels()))
            self._drawn = draw_round(self._tasks, self._node_seed, place.round, place.per_round, place.levels)
        example = self._drawn[place.taken]
        if place.taken + 1 < place.per_round:
            self.place = replace(place, taken=place.taken + 1)
        else:
            self.place, self._drawn = StreamPlace(place.round + 1, 0, place.per_round), []
        return example


def draw_round(
    tasks: Sequence[Task],
    node_seed: int,
    round_index: int,
    count: int,
    levels: Mapping[str, int] | None = None,
) -> list[Example]:
    """Returns training examples of one round: `count` of them, the tasks taking turns, at these levels.

    The turn begins with another task each round, so that few examples a round still reach all tasks. Raises
    TaskError when a task has too few training examples.
    """
    first = round_index * count % len(tasks)
    turns = [task.name for task in islice(cycle(tasks), first, first + count)]
    shares = Counter(turns)
    # One task after the other, although they take turns: two tasks may draw from one source.
    drawn = {
        task.name: iter(_take(task, _seeds(task, node_seed, round_index, levels or {}), shares[task.name]))
        for task in tasks
    }
    return [next(drawn[name]) for name in turns]


def _take(task: Task, seeds: Iterator[int], count: int) -> list[Example]:
    """Returns training examples of the first of these seeds, and of the others if the task's seeds are
    finite."""
    examples = list(islice(chain.from_iterable(draw_train(task, seed) for seed in seeds), count))
    if len(examples) < count:
        raise TaskError(
            f"{task.name} has too few training examples for one round",
            hint="a fifth of the prompts is held out for evaluation: ask more different questions, or measure"
            " on others (eval_dataset=, tasks.evaluation)",
        )
    return examples


def _seeds(task: Task, node_seed: int, round_index: int, levels: Mapping[str, int]) -> Iterator[int]:
    """Yields the round's seeds, at the task's level if it has one."""
    seeds = (round_seed(node_seed, round_index, attempt) for attempt in range(MAX_SEEDS_PER_ROUND))
    if task.name not in levels:
        return seeds
    from swarmnode.tasks.curriculum import at_level

    return (at_level(seed, levels[task.name]) for seed in seeds)


# ---- examples that others ask help with ----

EVERY = 2
"""Wanted examples are at most one in this many."""

MAX_WAITING = 256
"""Most wanted examples that wait for their turn; the oldest are given up for new ones."""

MAX_ANSWERED = 4096
"""Most examples that are remembered as wanted before."""


class WantedExamples(Iterator[Example]):
    """A stream's examples with wanted examples in between."""

    def __init__(self, stream: ExampleStream) -> None:
        self._stream = stream
        self._waiting: deque[Example] = deque(maxlen=MAX_WAITING)
        self._known: OrderedDict[ExampleKey, None] = OrderedDict()
        self._since_wanted = 0

    @property
    def place(self) -> StreamPlace:
        """The place of the stream. Wanted examples are no part of it."""
        return self._stream.place

    def want(self, examples: Iterable[Example]) -> None:
        """Queues these examples to be answered soon, except those that were wanted before."""
        for example in examples:
            if example.key in self._known:
                continue
            self._known[example.key] = None
            if len(self._known) > MAX_ANSWERED:
                self._known.popitem(last=False)
            self._waiting.append(example)

    def __next__(self) -> Example:
        if self._waiting and self._since_wanted + 1 >= EVERY:
            self._since_wanted = 0
            return self._waiting.popleft()
        self._since_wanted += 1
        return next(self._stream)

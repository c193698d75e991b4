"""The tasks as a learner uses them: its rollouts judged with a deadline, and the examples of its rounds.

task, example, completions -> [OwnJudge: JudgedTask.score] -> rewards, or none where the judge was lost
tasks -> [draw_round] -> one round of examples, or [ExampleStream], round after round ---------+-> rollout
training/foreign/rescue.py, Node (wanted) -> [WantedExamples], between those of the stream ----+

A node judges its own rollouts with a deadline, whatever the judge does, and with patience for a few. A
judgement that overran has no reward: unknown, and not zero. One such group is a line in the log. A task that
loses several in a row is left aside while others go on; where none is left, the run ends with an error, and
with the checkpoint of what was learnt.

A round trains on a fair share of every task, fresh each round, cheap to draw again. The draw is pure: the
same node seed and round give the same examples, so a node that resumes goes on where it was. Every round has
a seed of its own, and examples come from the beginning of it, so that a stranger who draws one again needs a
handful of draws and not thousands.

Who wants to learn from a stranger's answer to an example has to answer it first. Strangers choose those
examples, so they are at most every second one that we answer, and each is answered once.
"""

import hashlib
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any, TypeVar

from swarmnode.errors import JudgementLost, JudgementOverran, TaskError
from swarmnode.tasks.builtin import OurOwn
from swarmnode.tasks.task import (
    MAX_SEED,
    Environment,
    Isolated,
    Task,
    draw_train,
    is_environment,
    is_exchangeable,
    judges_groups,
    levels_of,
)
from swarmnode.types import Example, ExampleKey, Message

if TYPE_CHECKING:
    from swarmnode.chat import Turn

logger = logging.getLogger(__name__)


T = TypeVar("T")


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
        self.tasks: Mapping[str, Task] = {name: _judged(task, self) for name, task in tasks.items()}

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
        self.exchangeable = is_exchangeable(task)
        self.judges_groups = judges_groups(task)
        self.levels = levels_of(task)
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
        if isinstance(self.task, OurOwn | Isolated):
            return self.task.score(example, completions)
        return self._scored_in_thread(lambda: self.task.score(example, completions))

    def _scored_in_thread(self, work: Callable[[], T]) -> T:
        from swarmnode.tasks.daemon_threads import in_daemon_thread

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


class JudgedEnvironment(JudgedTask):
    """The same for a task that answers back. Who asks it has a deadline of their own."""

    def __init__(self, task: Environment, judge: OwnJudge) -> None:
        super().__init__(task, judge)
        self.most_turns = task.most_turns
        self._observe = task.observe

    def observe(self, example: Example, turns: "Sequence[Turn]") -> tuple[Message, ...] | None:
        """Raises JudgementLost once the judge is stopped, and what the environment raises."""
        if self._judge.stopped.done():
            raise JudgementLost("the node is stopping")
        return self._observe(example, turns)


def _judged(task: Task, judge: OwnJudge) -> JudgedTask:
    return JudgedEnvironment(task, judge) if is_environment(task) else JudgedTask(task, judge)


# ---- the examples of a round ----

MAX_SEEDS_PER_ROUND = 64
"""How many seeds of a finite task may be read for one round before we call it too small."""


def round_seed(node_seed: int, round_index: int, attempt: int = 0) -> int:
    """The seed of one round of one node: no two agree but by an accident of one in 2**63.

    >>> round_seed(0, 1) != round_seed(1, 0)
    True
    """
    name = f"{node_seed}/{round_index}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") & MAX_SEED


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """Where an `ExampleStream` is: `taken` examples of this round are gone, of the `per_round` it has."""

    round: int = 1
    taken: int = 0
    per_round: int = 0
    levels: Mapping[str, int] = field(default_factory=dict[str, int])
    """The levels that this round was drawn at, of tasks that have some (curriculum.py)."""


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
        """`levels`: those that a round that is drawn now should ask at."""
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
    """Training examples of one round: `count` of them, the tasks taking turns, at these levels.

    The turn begins with another task each round, so that few examples a round still reach all tasks.
    Raises TaskError when a task has too few training examples.
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
    """Training examples of the first of these seeds, then of the others where the task's are finite."""
    examples = list(islice(chain.from_iterable(draw_train(task, seed) for seed in seeds), count))
    if len(examples) < count:
        raise TaskError(
            f"{task.name} has too few training examples for one round",
            hint=f"try: swarmnode task check {task.name}",
        )
    return examples


def _seeds(task: Task, node_seed: int, round_index: int, levels: Mapping[str, int]) -> Iterator[int]:
    """The round's seeds, at the task's level where it has one."""
    seeds = (round_seed(node_seed, round_index, attempt) for attempt in range(MAX_SEEDS_PER_ROUND))
    if task.name not in levels:
        return seeds
    from swarmnode.tasks.curriculum import at_level

    return (at_level(seed, levels[task.name]) for seed in seeds)


# ---- examples that somebody else solved ----

EVERY = 2
"""Wanted examples are at most every second one."""

MAX_WAITING = 256
"""Wanted examples that wait for their turn; the oldest are given up for new ones."""

MAX_ANSWERED = 4096
"""Examples that are remembered to have been wanted before."""


class WantedExamples(Iterator[Example]):
    """A stream's examples, and those that were wanted between them."""

    def __init__(self, stream: ExampleStream) -> None:
        self._stream = stream
        self._waiting: deque[Example] = deque(maxlen=MAX_WAITING)
        self._known: OrderedDict[ExampleKey, None] = OrderedDict()
        self._since_wanted = 0

    @property
    def place(self) -> StreamPlace:
        """Where the stream is. Wanted examples are no part of it."""
        return self._stream.place

    def want(self, examples: Iterable[Example]) -> None:
        """Answer these soon, unless they were wanted before."""
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

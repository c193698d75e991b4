"""Conversations of a policy with its environments: threads that ask them, deadlines, and their answers."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial

from swarmnode.chat import Message, Turn
from swarmnode.errors import JudgementLost, JudgementOverran
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.open_group import OpenCompletion, OpenGroup, turns_so_far
from swarmnode.tasks.deadlines.daemon_threads import ThreadWork, in_daemon_thread
from swarmnode.tasks.deadlines.task_lock import leave_behind
from swarmnode.tasks.task import Environment
from swarmnode.types import Example

logger = logging.getLogger(__name__)

MOST_ASKED = 16
"""The most episodes asked at the same time, each in a thread."""

MOST_STUCK = 64
"""The most threads that overran and did not return. With that many, no environment is asked."""

LONGEST_WAIT_S = 0.2
"""The longest wait in seconds before checking again if the round should end, while everything left waits for
environments."""

Observed = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class ConversationRules:
    """The environments among a policy's tasks, by name, and the bounds of a conversation with them."""

    environments: Mapping[str, Environment]
    turn_timeout_s: float
    """The longest time that an environment may work on one turn, in seconds, without waiting for earlier
    ones."""

    def environment_of(self, example: Example) -> Environment | None:
        """Returns the environment of an example's task. None: the task does not answer back."""
        return self.environments.get(example.key.task)


NO_CONVERSATIONS = ConversationRules({}, turn_timeout_s=0.0)
"""Rules for a policy whose tasks never answer back."""


def continued(
    member: OpenCompletion, observed: Observed, token_ids: Sequence[int], max_tokens: int
) -> OpenCompletion:
    """Returns the member after its environment's answer. It has ended if the environment has nothing more to
    say, or if the policy has no tokens left after the answer."""
    if not observed:
        return replace(member, asking=False, finish="stop")
    if len(member.sampled) + len(token_ids) >= max_tokens:
        return replace(member, asking=False, finish="length")
    return replace(
        member,
        asking=False,
        sampled=member.sampled.with_given(token_ids),
        observed=(*member.observed, observed),
    )


@dataclass(slots=True, eq=False)
class _Question:
    """One turn that an environment has to answer."""

    group: OpenGroup
    place: int
    turns: Sequence[Turn]
    answer: ThreadWork[Observed | None] | None = None
    """Answer under way. None: no thread is free yet."""
    has_thread: bool = False
    """True while one of the counted threads works on it."""


class Conversations:
    """The conversations of one scheduler, called from one thread. A member of a group has at most one open
    question here, under its request's name."""

    def __init__(
        self,
        rules: ConversationRules,
        renderer: Renderer,
        budget: Callable[[Example, int], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget`: the most tokens of a completion, by its example and its place in the group. Raises
        ModelError if the policy's chat template cannot hold a conversation."""
        if rules.environments:
            renderer.observation_ids(({"role": "tool", "content": "7"},))
        self.rules = rules
        self._renderer = renderer
        self._budget = budget
        self._clock = clock
        self._questions: list[_Question] = []
        """Questions whose answer has not been heard yet."""
        self._left: list[Future[Observed | None]] = []
        """Answers that nobody waits for any more."""
        self._played_elsewhere: set[str] = set()
        """Request names of members whose environment has heard nothing of them in this process."""
        self._told: set[str] = set()
        """Tasks for which a broken-off conversation has been logged."""
        self._told_of_restart = False
        self._lock = threading.Lock()
        """Guards the fields below: a thread that is done starts the next one."""
        self._waiting: deque[_Question] = deque()
        self._threads = 0

    def __len__(self) -> int:
        """Returns the number of members waiting for their environment."""
        return len(self._questions)

    def turn_over(self, group: OpenGroup, place: int) -> bool:
        """Handles a member that the engine returned as ended. Returns True if its environment is now asked,
        so the member has not ended."""
        member = group.members[place]
        environment = self.rules.environment_of(group.example)
        if environment is None or member.finish != "stop" or member.turns >= environment.most_turns:
            return False
        group.members[place] = replace(member, finish=None, asking=True)
        self._ask(group, place)
        return True

    def revive(self, group: OpenGroup) -> None:
        """Continues the members of a group from another process, as far as their environments can."""
        for place in group.unfinished:
            if group.members[place].observed:
                self._played_elsewhere.add(group.request_id(place))
        for place in group.asking:
            self._ask(group, place)

    def heard(self, should_stop: Callable[[], bool]) -> Iterator[tuple[OpenGroup, int]]:
        """Yields the members whose environments have answered or failed: each has ended, or continues. If an
        environment was ended because the node stops, its members ask again in the next process. Raises
        TaskError for a broken environment."""
        done = [one for one in self._questions if one.answer is not None and one.answer.done()]
        late = [one for one in self._questions if self._overran(one)]
        over = {*done, *late}
        self._questions = [one for one in self._questions if one not in over]
        for question in late:
            self._leave_behind(question)
            yield question.group, question.place
        for question in done:
            self._settle(question, should_stop)
            yield question.group, question.place

    def wait(self) -> None:
        """Waits until an environment answers, or for a moment."""
        if futures := [question.answer for question in self._questions if question.answer is not None]:
            wait(futures, LONGEST_WAIT_S, FIRST_COMPLETED)

    def forget(self, group: OpenGroup) -> None:
        """Drops all questions of this group and their answers."""
        for question in self._questions:
            if question.group is group:
                self._leave(question)
        self._questions = [one for one in self._questions if one.group is not group]
        self._played_elsewhere -= {group.request_id(place) for place in range(len(group.members))}

    def forget_all(self) -> None:
        """Drops all questions of all groups and their answers."""
        for group in [question.group for question in self._questions]:
            self.forget(group)
        self._played_elsewhere.clear()
        self._told_of_restart = False

    # ---- asking ----

    def _ask(self, group: OpenGroup, place: int) -> None:
        question = _Question(group, place, turns_so_far(group.members[place], self._renderer))
        self._questions.append(question)
        self._left = [answer for answer in self._left if not answer.done()]
        if len(self._left) >= MOST_STUCK:
            question.answer = ThreadWork()
            lost = JudgementOverran(f"{len(self._left)} environments never answered")
            question.answer.set_exception(lost)
            return
        with self._lock:
            self._waiting.append(question)
            self._start()

    def _start(self) -> None:
        """Asks waiting questions while threads are free. The caller holds the lock."""
        while self._waiting and self._threads < MOST_ASKED:
            question = self._waiting.popleft()
            self._threads += 1
            question.has_thread, limit_s = True, self.rules.turn_timeout_s
            question.answer = in_daemon_thread(partial(self._observe, question), limit_s, self._clock)

    def _observe(self, question: _Question) -> Observed | None:
        example = question.group.example
        try:
            return self.rules.environments[example.key.task].observe(example, question.turns)
        finally:
            self._free(question)

    def _free(self, question: _Question) -> None:
        """Frees a thread for the next question, or stops counting it."""
        with self._lock:
            if question.has_thread:
                question.has_thread = False
                self._threads -= 1
                self._start()

    def _leave(self, question: _Question) -> None:
        with self._lock:
            if question.answer is None:
                self._waiting.remove(question)
                return
        leave_behind(question.answer.thread)
        self._left.append(question.answer)
        self._free(question)

    def _overran(self, question: _Question) -> bool:
        asked = question.answer
        return asked is not None and not asked.done() and asked.clock.left_s <= 0

    # ---- results ----

    def _settle(self, question: _Question, should_stop: Callable[[], bool]) -> None:
        group, place = question.group, question.place
        assert question.answer is not None
        try:
            observed = question.answer.result() or ()
        except JudgementLost as lost:
            if not should_stop():
                self._lose(group, place, lost)
            return
        self._played_elsewhere.discard(group.request_id(place))
        ids = self._renderer.observation_ids(observed) if observed else ()
        budget = self._budget(group.example, place)
        group.members[place] = continued(group.members[place], observed, ids, budget)

    def _leave_behind(self, question: _Question) -> None:
        self._leave(question)
        limit = self.rules.turn_timeout_s
        lost = JudgementOverran(
            f"the environment {question.group.example.key.task} did not answer within {limit:g} s"
        )
        self._break_off(question.group, question.place, lost)

    def _lose(self, group: OpenGroup, place: int, lost: JudgementLost) -> None:
        """Restarts a conversation that another process began and this one cannot replay, or breaks it off."""
        name = group.request_id(place)
        if name in self._played_elsewhere and not isinstance(lost, JudgementOverran):
            level = logging.DEBUG if self._told_of_restart else logging.INFO
            left = len(self._played_elsewhere)
            logger.log(level, "conversations from before the restart (%d at most) start over: %s", left, lost)
            self._told_of_restart = True
            self._played_elsewhere.discard(name)
            group.members[place] = OpenCompletion()
            return
        self._break_off(group, place, lost)

    def _break_off(self, group: OpenGroup, place: int, lost: JudgementLost) -> None:
        task = group.example.key.task
        level = logging.DEBUG if task in self._told else logging.WARNING
        self._told.add(task)
        logger.log(
            level,
            "%s; the conversation gets no reward. To allow more time: --set tasks.turn_timeout_s=SECONDS",
            lost,
        )
        group.members[place] = replace(group.members[place], asking=False, finish="stop", broken_off=True)

"""Conversations of a policy with an environment: who is asked, for how long, and what becomes of the answer.

engine: a turn ends -> partial.py -> [Conversations.turn_over] -> threads -> Environment.observe
partial.py <- goes on, or has ended <- [Conversations.heard] <- [continued] <- what was observed

The engine never waits: an environment is asked in a thread, and what runs goes on meanwhile. What it says is
put behind the turn as given tokens, and the same request is submitted again. A conversation is over when the
environment has nothing more to say, when the policy had all its turns, or when its tokens are used up.

An environment that takes too long, or is lost, costs its own completion its reward and nobody anything else.
A thread cannot be ended, so those that overran are counted, and with too many of them nobody is asked any
more until one returns. Only `partial.py` with an environment among its tasks imports this module.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from swarmnode.errors import JudgementLost, JudgementOverran
from swarmnode.rollout.engine import Request
from swarmnode.rollout.schedule.group import OpenCompletion, OpenGroup, Renderer, turns_so_far
from swarmnode.tasks.daemon_threads import in_daemon_thread
from swarmnode.tasks.task import Environment
from swarmnode.types import Example, Message

logger = logging.getLogger(__name__)

MOST_ASKED = 16
"""Episodes that are asked at the same time, each in a thread. Many environments answer one after the other,
and the time of an answer counts from when it is asked for."""

MOST_STUCK = 64
"""Threads that overran and did not return. With so many, no environment is asked."""

LONGEST_WAIT_S = 0.2
"""So long nobody looks whether the round should end, where all that is left waits for environments."""

Observed = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class ConversationRules:
    """The environments among a policy's tasks, by name, and what bounds a conversation with them."""

    environments: Mapping[str, Environment]
    max_turns: int
    """Turns of the policy; those of the environment are fewer where it says so."""
    turn_timeout_s: float
    """Longest that an environment may take to answer one turn."""
    max_turn_tokens: int | None = None
    """Longest turn of the policy. None: the whole completion is bounded and nothing else."""

    def environment_of(self, example: Example) -> Environment | None:
        """None: nobody answers to this example's answers."""
        return self.environments.get(example.key.task)

    def most_turns(self, example: Example) -> int:
        """Turns that the policy has with this example at most."""
        return min(self.max_turns, self.environments[example.key.task].most_turns)

    def bounded(self, request: Request, example: Example, turn: int) -> Request:
        """A request for no more than this turn, the first one being 1."""
        sampling = request.sampling
        if self.max_turn_tokens is not None:
            most = min(sampling.max_tokens, request.sampled.turn_start + self.max_turn_tokens)
            sampling = replace(sampling, max_tokens=most)
        return replace(request, sampling=sampling, goes_on=turn < self.most_turns(example))


def continued(
    member: OpenCompletion, observed: Observed, token_ids: Sequence[int], max_tokens: int
) -> OpenCompletion:
    """The member after its environment answered: ended where it has nothing more to say, or where the policy
    could say nothing behind it."""
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
    began: float = 0.0
    answer: "Future[Observed | None] | None" = None
    """None: no thread is free yet."""


class Conversations:
    """The conversations of one scheduler, from which one thread asks. A member of a group has at most one
    question here, under its request's name."""

    def __init__(
        self,
        rules: ConversationRules,
        renderer: Renderer,
        budget: Callable[[Example, int], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget`: the most tokens of a completion, by its example and its place in the group."""
        self.rules = rules
        self._renderer = renderer
        self._budget = budget
        self._clock = clock
        self._waiting: deque[_Question] = deque()
        self._asked: list[_Question] = []
        self._left: list[Future[Observed | None]] = []
        self._played_elsewhere: set[str] = set()
        """Members whose environment has heard nothing of them in this process, by request name."""
        self._told: set[str] = set()

    def __len__(self) -> int:
        """Members that wait for their environment."""
        return len(self._waiting) + len(self._asked)

    def turn_over(self, group: OpenGroup, place: int) -> bool:
        """Look at a member that the engine gave back as ended: True where its environment is asked now, and
        the member has not ended."""
        member = group.members[place]
        if self.rules.environment_of(group.example) is None or member.finish != "stop":
            return False
        if member.turns >= self.rules.most_turns(group.example):
            return False
        group.members[place] = replace(member, finish=None, asking=True)
        self._ask(group, place)
        return True

    def revive(self, group: OpenGroup) -> None:
        """Go on with the members of a group of another process, as far as their environments can."""
        for place in group.unfinished:
            if group.members[place].observed:
                self._played_elsewhere.add(group.request_id(place))
        for place in group.asking:
            self._ask(group, place)

    def heard(self, should_stop: Callable[[], bool]) -> Iterator[tuple[OpenGroup, int]]:
        """Members whose environments have answered, or will not any more: each has ended, or goes on. Where
        an environment was ended because the node stops, its members ask again in the next process.
        Raises TaskError where an environment is broken."""
        done = [one for one in self._asked if one.answer is not None and one.answer.done()]
        late = [one for one in self._asked if one not in done and self._overran(one)]
        self._asked = [one for one in self._asked if one not in done and one not in late]
        self._start()
        for question in late:
            self._leave_behind(question)
            yield question.group, question.place
        for question in done:
            self._settle(question, should_stop)
            yield question.group, question.place

    def wait(self) -> None:
        """Wait until somebody answers, or for a moment."""
        if futures := [question.answer for question in self._asked if question.answer is not None]:
            wait(futures, LONGEST_WAIT_S, FIRST_COMPLETED)

    def forget(self, group: OpenGroup) -> None:
        """Whatever is answered to this group is not listened to."""
        self._waiting = deque(one for one in self._waiting if one.group is not group)
        self._left += [one.answer for one in self._asked if one.group is group and one.answer is not None]
        self._asked = [one for one in self._asked if one.group is not group]
        self._played_elsewhere -= {group.request_id(place) for place in range(len(group.members))}

    def forget_all(self) -> None:
        """The same for all groups."""
        for group in [one.group for one in (*self._waiting, *self._asked)]:
            self.forget(group)
        self._played_elsewhere.clear()

    # ---- asking ----

    def _ask(self, group: OpenGroup, place: int) -> None:
        self._waiting.append(_Question(group, place))
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._asked) < MOST_ASKED:
            question = self._waiting.popleft()
            question.began = self._clock()
            question.answer = self._started(question)
            self._asked.append(question)

    def _started(self, question: _Question) -> "Future[Observed | None]":
        self._left = [answer for answer in self._left if not answer.done()]
        if len(self._left) >= MOST_STUCK:
            refused: Future[Observed | None] = Future()
            refused.set_exception(JudgementOverran(f"{len(self._left)} answers of environments never came"))
            return refused
        example = question.group.example
        environment = self.rules.environments[example.key.task]
        turns = turns_so_far(question.group.members[question.place], self._renderer)
        return in_daemon_thread(lambda: environment.observe(example, turns))

    def _overran(self, question: _Question) -> bool:
        return self._clock() - question.began >= self.rules.turn_timeout_s

    # ---- what becomes of a member ----

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
        assert question.answer is not None
        self._left.append(question.answer)
        limit = self.rules.turn_timeout_s
        lost = JudgementOverran(
            f"the environment {question.group.example.key.task} did not answer within {limit:g} s"
        )
        self._break_off(question.group, question.place, lost)

    def _lose(self, group: OpenGroup, place: int, lost: JudgementLost) -> None:
        """A conversation that another process began, and this one cannot play again, starts over."""
        name = group.request_id(place)
        if name in self._played_elsewhere and not isinstance(lost, JudgementOverran):
            self._played_elsewhere.discard(name)
            logger.info("a conversation about %s starts over: %s", group.name, lost)
            group.members[place] = OpenCompletion()
            return
        self._break_off(group, place, lost)

    def _break_off(self, group: OpenGroup, place: int, lost: JudgementLost) -> None:
        task = group.example.key.task
        level = logging.DEBUG if task in self._told else logging.WARNING
        self._told.add(task)
        logger.log(level, "%s: the conversation has no reward. --set tasks.turn_timeout_s=SECONDS", lost)
        group.members[place] = replace(group.members[place], asking=False, finish="stop", broken_off=True)

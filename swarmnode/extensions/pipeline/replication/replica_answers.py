"""Answers to the other replicas of our stage: contributions, holdings, and the weights after the step.

replica_exchange.py (exchanges that run here) -> [ReplicaAnswers] <- incoming_streams.py <- a replica

A question may come before we are as far: it waits, within bounds, until there is an answer. Only replicas of
our stage are answered, and only about the iteration that runs, the one before and the next.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.replication.contribution_tally import ContributionTally, SeenHeads
from swarmnode.extensions.pipeline.replication.gradient_exchange import StageIteration
from swarmnode.extensions.pipeline.replication.replica_questions import AskDigest, AskGradients, Question
from swarmnode.extensions.pipeline.replication.replica_vote import ReplicaWeights
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply
from swarmnode.extensions.pipeline.wire.refusals import Refusal

KEPT_EXCHANGES = 2
"""Exchanges that are kept: the running one, and the one before for replicas that come late."""

MAX_WAITING = 3
"""Questions of one replica that may wait for us: it goes from one step of the exchange to the next."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AnswerScope:
    """Our stage under a plan: the bounds of questions that others may ask us."""

    plan: str
    stage: int
    replicas: frozenset[str]
    iteration: int
    """The first iteration under the plan."""


@dataclass(slots=True)
class AveragingUnderWay:
    """An exchange that other replicas may ask about."""

    tally: ContributionTally
    published: list[SeenHeads] = field(default_factory=list[SeenHeads])
    """Our holdings at the end of each round."""
    closed: SeenHeads | None = None
    silent: set[str] = field(default_factory=set[str])
    """Replicas that it was closed without and that have not been heard of since."""

    def at(self, number: int) -> SeenHeads | None:
        """Return our holdings at the end of a round; None before it."""
        return self.published[number] if number < len(self.published) else self.closed


class ReplicaAnswers:
    """Answers questions by `answer`."""

    def __init__(self, note_late: Callable[[], None]) -> None:
        """`note_late`: called when a replica asks after an exchange was closed without it."""
        self.scope: AnswerScope | None = None
        self._note_late = note_late
        self._running: OrderedDict[StageIteration, AveragingUnderWay] = OrderedDict()
        self._weights: OrderedDict[StageIteration, ReplicaWeights] = OrderedDict()
        self._changed = asyncio.Event()
        self._waiting: Counter[str] = Counter()

    def running(self, exchange: StageIteration) -> AveragingUnderWay | None:
        return self._running.get(exchange)

    def open(self, exchange: StageIteration, running: AveragingUnderWay) -> None:
        """Record that an exchange has begun here. The bytes of former ones are released."""
        for former in self._running.values():
            former.tally.release()
        self._running[exchange] = running
        if len(self._running) > KEPT_EXCHANGES:
            self._running.popitem(last=False)
        self.tell()

    def weigh(self, exchange: StageIteration, weights: ReplicaWeights) -> None:
        """Record the weights after the step of an exchange."""
        self._weights[exchange] = weights
        if len(self._weights) > KEPT_EXCHANGES:
            self._weights.popitem(last=False)
        self.tell()

    def tell(self) -> None:
        """Wake the questions that wait for an answer."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, incoming: Incoming[Question]) -> Reply:
        """Answer a question, waiting until it can be. Raises Rejected."""
        peer_id, question = incoming.peer_id, incoming.message
        exchange = question.exchange
        self._check_scope(peer_id, exchange)
        if isinstance(question, AskDigest):
            return Reply(await self._until(peer_id, lambda: self._weights.get(exchange)))
        running = await self._until(peer_id, lambda: self._running.get(exchange))
        if peer_id not in running.tally.replicas:
            raise Rejected(Refusal.NOT_A_MEMBER, "of this stage")
        if isinstance(question, AskGradients):
            found = running.tally.found(question.author)
            return Reply(found.signed.sealed, found.data) if found else Reply(b"")
        number = question.round
        if peer_id in running.silent:
            running.silent.remove(peer_id)
            self._note_late()
        return Reply(await self._until(peer_id, lambda: running.at(number)))

    async def _until(self, peer_id: str, ready: Callable[[], _T | None]) -> _T:
        """Wait until `ready` returns a value. Bounded by the time that the asker gives. Raises Rejected
        if too many questions of the peer wait."""
        if (found := ready()) is not None:
            return found
        if self._waiting[peer_id] >= MAX_WAITING:
            raise Rejected(Refusal.TOO_MANY_STREAMS, f"of {peer_id}, which wait")
        self._waiting[peer_id] += 1
        try:
            while (found := ready()) is None:
                await self._changed.wait()
        finally:
            self._waiting[peer_id] -= 1
            self._waiting += Counter()  # forgets the peers at zero
        return found

    def _check_scope(self, peer_id: str, exchange: StageIteration) -> None:
        """Raises Rejected for a question outside of the plan, before anything is waited for. Nothing is known
        of a plan that we have yet to take up."""
        scope = self.scope
        if scope is None or scope.plan != exchange.plan:
            return
        if exchange.stage != scope.stage or peer_id not in scope.replicas:
            raise Rejected(Refusal.NOT_A_MEMBER, "of this stage")
        begun = (each.iteration for each in (*self._running, *self._weights) if each.plan == scope.plan)
        if exchange.iteration > max(begun, default=scope.iteration) + 1:
            raise Rejected(Refusal.TOO_EARLY, f"for iteration {exchange.iteration}")

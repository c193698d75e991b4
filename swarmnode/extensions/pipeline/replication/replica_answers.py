"""Answers to other replicas of our stage: our contribution, what we hold, and the weights after the step.

replica_exchange.py (exchanges that run here) -> [ReplicaAnswers] <- incoming_streams.py <- a replica

A question may come before we have the answer: it waits, within limits, until we do. We answer only replicas
of our stage, and only about the running iteration, the one before and the next.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.plans.assignment import Assignment
from swarmnode.extensions.pipeline.replication.contributions import Contribution
from swarmnode.extensions.pipeline.replication.gradient_exchange import StageIteration
from swarmnode.extensions.pipeline.replication.replica_questions import (
    AskDigest,
    AskGradients,
    HeldContributions,
    Question,
)
from swarmnode.extensions.pipeline.replication.replica_vote import ReplicaWeights
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.waiting import ChangeSignal

KEPT_EXCHANGES = 2
"""Number of exchanges kept: the running one, and the one before for replicas that come late."""

MAX_WAITING = 3
"""Questions of one replica that may wait for us, since it moves through the steps of the exchange."""

_T = TypeVar("_T")


@dataclass(slots=True)
class OwnAnswers:
    """Our answers to questions about one iteration. None: not available yet."""

    contribution: Contribution | None = None
    held: HeldContributions | None = None
    weights: ReplicaWeights | None = None


class ReplicaAnswers:
    """Answers the questions of other replicas with `answer`."""

    def __init__(self) -> None:
        self.assignment: Assignment | None = None
        """Our part in the plan. Only replicas of the same stage may ask about it."""
        self._own = BoundedDict[StageIteration, OwnAnswers](KEPT_EXCHANGES)
        self._changed = ChangeSignal()
        self._waiting: Counter[str] = Counter()

    def of(self, stage_iteration: StageIteration) -> OwnAnswers:
        """Return our answers about an iteration, to be filled in. Call `tell` afterwards."""
        own = self._own[stage_iteration] = self._own.get(stage_iteration) or OwnAnswers()
        return own

    def tell(self) -> None:
        """Wake the questions that wait for an answer."""
        self._changed.tell()

    async def answer(self, incoming: Incoming[Question]) -> Reply:
        """Answer a question, after waiting until we can. Raises Rejected."""
        peer_id, question = incoming.peer_id, incoming.message
        self._check_asker(peer_id, question.stage_iteration)

        def own() -> OwnAnswers:
            return self._own.get(question.stage_iteration) or OwnAnswers()

        if isinstance(question, AskGradients):
            found = await self._until(peer_id, lambda: own().contribution)
            return Reply(found.head, found.data)
        if isinstance(question, AskDigest):
            return Reply(await self._until(peer_id, lambda: own().weights))
        return Reply(await self._until(peer_id, lambda: own().held))

    async def _until(self, peer_id: str, ready: Callable[[], _T | None]) -> _T:
        """Wait until `ready` returns a value. The asker's time limit bounds the wait. Raises Rejected if too
        many questions of the peer wait."""
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

    def _check_asker(self, peer_id: str, stage_iteration: StageIteration) -> None:
        """Raises Rejected for a question that does not fit the plan, before any wait. Questions about a plan
        that we have not adopted yet cannot be checked."""
        ours = self.assignment
        if ours is None or ours.digest != stage_iteration.plan:
            return
        if stage_iteration.stage != ours.stage or peer_id not in ours.replicas:
            raise Rejected(Refusal.NOT_A_MEMBER, "of this stage")
        begun = (each.iteration for each in self._own if each.plan == ours.digest)
        if stage_iteration.iteration > max(begun, default=ours.iteration) + 1:
            raise Rejected(Refusal.TOO_EARLY, f"for iteration {stage_iteration.iteration}")

"""Adds up the gradients of a stage's replicas: survivors get the same sum, bit for bit, or detect otherwise.

StageWorker.take_gradients -> [ReplicaExchange.combine] -> StageWorker.apply -> [ReplicaExchange.compare]
                                 |
              contributions.py (bytes), contribution_tally.py (which of them count)

Why not hivemind's averager: we measured it. One peer with NaN makes
everyone's tensors NaN, and one that claims a weight of 1e6 replaces them. When a peer dies inside a round,
survivors hold different tensors and are not told. Members of a group are not authenticated. It must fork
before CUDA starts, its processes outlive a killed parent (39 minutes, when last looked at), and a group with
one peer missing forms after 3 s.

1. Gather. Each replica asks every other one for its contribution. Bounds are checked before bytes are read:
   tokens and micro-batches, exactly the parameters of the stage. Then finiteness is checked.
2. Agree. Each replica asks the others which contributions they hold. A contribution counts if most of the
   answering replicas hold it.
3. Sum, in the order of peer ids, the contributions whose norm per token is not far above the median
   (contribution_tally.py).
4. After the step, compare the weights. If a death or a lie has caused different sums, replica_vote.py
   decides.

All replicas send to all others: (r - 1) x size out of each of r replicas. A reduce-scatter sends
2 (r - 1) / r x size: the same for two replicas, 2/3 of it for three, half for four. But then each replica
sees only a part of the others' gradients, and has to believe sums that it cannot check. For adapters (8 MB
per stage) the difference is under a second at 100 Mbit/s.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Self, TypeVar

from swarmnode.errors import NetworkError, Rejected
from swarmnode.extensions.pipeline.plans.assignment import Assignment
from swarmnode.extensions.pipeline.replication.contribution_tally import combined
from swarmnode.extensions.pipeline.replication.contributions import (
    Contribution,
    Head,
    contribute,
    most_bytes,
    read_values,
    size_bytes,
)
from swarmnode.extensions.pipeline.replication.gradient_exchange import (
    Combined,
    ContributionBounds,
    ContributionFault,
    GradientExchangeSettings,
    StageIteration,
)
from swarmnode.extensions.pipeline.replication.replica_answers import ReplicaAnswers
from swarmnode.extensions.pipeline.replication.replica_questions import (
    AskDigest,
    AskGradients,
    AskHeld,
    HeldContributions,
    Question,
    StageQuestion,
)
from swarmnode.extensions.pipeline.replication.replica_vote import ReplicaVote, ReplicaWeights, vote_of
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum
from swarmnode.extensions.pipeline.wire.incoming_streams import ServiceHandler
from swarmnode.extensions.pipeline.wire.member_streams import AnswerBody, MemberStreams
from swarmnode.extensions.pipeline.wire.of_each import of_each
from swarmnode.extensions.pipeline.wire.refusals import BadAnswer, MemberRefused
from swarmnode.extensions.pipeline.wire.services import MemberService

NOTHING = GradientSum({}, 0, 0)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ReplicaExchange:
    """A `GradientExchange` over streams.

    async with ReplicaExchange(streams) as exchange:
        exchange.admit(assignment.peers)
        combined = await exchange.combine(worker.take_gradients(), StageIteration(plan, 1, 7), ...)
    """

    def __init__(self, streams: MemberStreams, settings: GradientExchangeSettings | None = None) -> None:
        self._streams = streams
        self._members: frozenset[str] = frozenset()
        self._settings = settings or GradientExchangeSettings()
        self._answers = ReplicaAnswers()
        self._silent: frozenset[str] = frozenset()
        """Replicas that did not answer in the last exchange."""

    async def __aenter__(self) -> Self:
        handler = ServiceHandler(Question, self._answers.answer, lambda peer_id: peer_id in self._members)
        self._streams.incoming.begin(MemberService.GRADIENTS, handler)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._streams.incoming.end(MemberService.GRADIENTS)

    def admit(self, peers: Collection[str], assignment: Assignment | None = None) -> None:
        """Answer only these members from now on. `assignment`: ours under the plan, which limits what they
        may ask."""
        self._members = frozenset(peers)
        self._answers.assignment = assignment

    async def combine(
        self,
        own: GradientSum,
        stage_iteration: StageIteration,
        replicas: Sequence[str],
        bounds: ContributionBounds,
    ) -> Combined:
        """Implements `GradientExchange.combine`. A frozen replica costs `contribution_timeout_s` plus the
        time for its bytes. If every replica would refuse our own gradients, an empty contribution replaces
        them. Raises ModelError for gradients that do not belong to this stage."""
        us, answers = self._streams.peer_id, self._answers.of(stage_iteration)
        others = sorted(set(replicas) - {us})
        if not others:
            return Combined(own, (us,), {})
        # The contributions of all others share the line.
        fetch_s = len(others) * most_bytes(bounds) / self._settings.least_bytes_per_s
        fetch_s += self._settings.contribution_timeout_s
        answers.contribution = await self._contribution(own, stage_iteration, bounds)
        self._answers.tell()
        found = await of_each(others, lambda peer: self._fetch(peer, stage_iteration, bounds, fetch_s))
        faults = {peer: one for peer, one in found.items() if isinstance(one, str)}
        came = {us: answers.contribution}
        came |= {peer: one for peer, one in found.items() if isinstance(one, Contribution)}
        self._silent = frozenset(peer for peer, fault in faults.items() if fault == ContributionFault.SILENT)
        answers.held = HeldContributions({peer: one.digest for peer, one in came.items()})
        self._answers.tell()
        # A replica may have started a whole step later than we did, and waited equally long for a dead one.
        timeout_s = 2 * fetch_s + self._settings.round_timeout_s
        told = await self._asked(
            set(others) - self._silent, AskHeld(stage_iteration), HeldContributions, lambda _: timeout_s
        )
        held = [answers.held.digests, *(one.digests for one in told.values())]
        ratio = self._settings.max_norm_ratio
        return await asyncio.to_thread(combined, came, faults, held, max_norm_ratio=ratio)

    async def compare(
        self, digest: str, stage_iteration: StageIteration, replicas: Sequence[str], *, before: str = ""
    ) -> ReplicaVote:
        """Implements `GradientExchange.compare`. If replicas differ, replica_vote.py decides."""
        us, answers = self._streams.peer_id, self._answers.of(stage_iteration)
        weights = answers.weights = ReplicaWeights(digest, before)
        answers.contribution = None  # Its bytes are no longer needed.
        self._answers.tell()
        others = sorted(set(replicas) - {us})
        patient_s, short_s = self._settings.contribution_timeout_s, self._settings.round_timeout_s
        said = await self._asked(
            others,
            AskDigest(stage_iteration),
            ReplicaWeights,
            lambda peer: short_s if peer in self._silent else patient_s,
        )
        return vote_of(us, {us: weights, **said})

    async def _contribution(
        self, own: GradientSum, stage_iteration: StageIteration, bounds: ContributionBounds
    ) -> Contribution:
        try:
            return await asyncio.to_thread(contribute, own, bounds)
        except Rejected as rejected:
            logger.warning(
                "our gradients of iteration %d are left out: %s", stage_iteration.iteration, rejected
            )
            return contribute(NOTHING, bounds)

    async def _fetch(
        self, peer_id: str, stage_iteration: StageIteration, bounds: ContributionBounds, timeout_s: float
    ) -> Contribution | str:
        """Return the contribution of a replica, or the reason why there is none."""
        body = AnswerBody(lambda head: size_bytes(head, bounds))
        try:
            head = await self._streams.ask(
                peer_id,
                MemberService.GRADIENTS,
                AskGradients(stage_iteration),
                Head,
                timeout_s=timeout_s,
                body=body,
            )
            return await asyncio.to_thread(read_values, head, body.data, bounds)
        except (NetworkError, MemberRefused) as error:
            return error.reason if isinstance(error, BadAnswer) else ContributionFault.SILENT
        except Rejected as rejected:
            return rejected.reason

    async def _asked(
        self,
        peers: Collection[str],
        question: StageQuestion,
        answer: type[_T],
        timeout_s: Callable[[str], float],
    ) -> dict[str, _T]:
        """Ask these replicas at the same time. Returns the answers of those that gave one."""

        async def ask(peer_id: str) -> _T | None:
            try:
                return await self._streams.ask(
                    peer_id, MemberService.GRADIENTS, question, answer, timeout_s=timeout_s(peer_id)
                )
            except (NetworkError, Rejected):
                return None

        found = await of_each(peers, ask)
        return {peer: told for peer, told in found.items() if told is not None}

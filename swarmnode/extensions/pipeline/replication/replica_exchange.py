"""The replicas of a stage add up their gradients: all survivors sum the same, bit for bit, or know better.

StageWorker.take_gradients -> [ReplicaExchange.combine] -> StageWorker.apply -> [ReplicaExchange.compare]
                                 |
              contributions.py (signed bytes), contribution_tally.py (which of them count)

Why not hivemind's averager: it was measured (shared/reference/network.md, sections 2, 4 and 5). One peer with
NaN makes everyone's tensors NaN, and one that claims a weight of 1e6 replaces them; when a peer dies inside a
round, survivors hold different tensors and are not told; members of a group are not authenticated; it must
fork before CUDA starts, its processes outlive a killed parent (39 minutes, when last looked at), and a group
with one peer missing forms after 3 s.

1. Gather. Everyone asks every other replica for its contribution. Bounds are checked before bytes are read:
   the signature, tokens and micro-batches, exactly the parameters of the stage. Then digest and finiteness.
2. Agree. In rounds, everyone asks the others which signed contributions they have seen and which they hold,
   and fetches what it lacks from whoever has it, until all that answer say the same. A death in one round
   costs one more; without any it is one round.
3. Sum, in the order of the peer ids, those whose norm a token is not far above the median
(contribution_tally.py).

Everybody sends to everybody: (r - 1) x size out of each of r replicas. A reduce-scatter sends 2 (r - 1) / r x
size: the same for two replicas, 2/3 of it for three, half for four. But there each replica sees a part of the
others' gradients and has to believe sums that it cannot check. For adapters (8 MB a stage) the difference is
under a second at 100 Mbit/s; from three replicas and hundreds of megabytes on (full training) use codec fp16,
which saves as much.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self, TypeVar

from swarmnode.errors import NetworkError, Rejected
from swarmnode.extensions.pipeline.replication.contribution_tally import ContributionTally, SeenHeads
from swarmnode.extensions.pipeline.replication.contributions import (
    Contribution,
    SignedHead,
    contribute,
    fault_of,
    most_bytes,
    open_head,
    read_values,
    size_bytes,
)
from swarmnode.extensions.pipeline.replication.gradient_exchange import (
    AveragingSettings,
    Combined,
    ContributionBounds,
    ContributionFault,
    ExchangeCounters,
    StageIteration,
)
from swarmnode.extensions.pipeline.replication.replica_answers import (
    AnswerScope,
    AveragingUnderWay,
    ReplicaAnswers,
)
from swarmnode.extensions.pipeline.replication.replica_questions import (
    MAX_ROUNDS,
    NOT_HERE,
    AskDigest,
    AskGradients,
    AskHeldGradients,
    Question,
    StageQuestion,
)
from swarmnode.extensions.pipeline.replication.replica_vote import ReplicaVote, ReplicaWeights, agreement_of
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum
from swarmnode.extensions.pipeline.wire.incoming_streams import ServiceHandler
from swarmnode.extensions.pipeline.wire.member_streams import AnswerBody, MemberStreams
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.identity.node_key import NodeKey

NOTHING = GradientSum({}, 0, 0)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ReplicaExchange:
    """A `GradientExchange` over streams.

    async with ReplicaExchange(streams, key) as exchange:
        exchange.admit(assignment.peers)
        combined = await exchange.combine(worker.take_gradients(), StageIteration(plan, 1, 7), ...)
    """

    def __init__(
        self, streams: MemberStreams, key: NodeKey, settings: AveragingSettings | None = None
    ) -> None:
        """`key`: that of the host's peer id."""
        self._streams = streams
        self._key = key
        self._members: frozenset[str] = frozenset()
        self._settings = settings or AveragingSettings()
        self.counters = ExchangeCounters()
        self._answers = ReplicaAnswers(self._note_late)

    async def __aenter__(self) -> Self:
        handler = ServiceHandler(Question, self._answers.answer, lambda peer_id: peer_id in self._members)
        self._streams.incoming.begin(MemberService.GRADIENTS, handler)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._streams.incoming.end(MemberService.GRADIENTS)

    def admit(self, peers: Collection[str], scope: AnswerScope | None = None) -> None:
        """Answer these members from now on, and no others. `scope`: the questions that they may ask under the
        plan."""
        self._members = frozenset(peers)
        self._answers.scope = scope

    async def combine(
        self,
        own: GradientSum,
        exchange: StageIteration,
        replicas: Sequence[str],
        expected: ContributionBounds,
    ) -> Combined:
        """Implements `GradientExchange.combine`. A frozen replica costs `contribution_timeout_s` and the time
        that its bytes may take. If our own gradients would be refused by every replica, they count as none.
        Raises ModelError for gradients that are not of this stage."""
        contribution = await self._own(own, exchange, expected)
        among = (*replicas, self._key.peer_id)
        ratio = self._settings.max_norm_ratio
        running = AveragingUnderWay(
            ContributionTally(contribution, exchange, tuple(set(among)), expected, max_norm_ratio=ratio)
        )
        self._answers.open(exchange, running)
        answering = await self._gather(running)
        agreed = await self._agree(running, answering)
        combined = await asyncio.to_thread(running.tally.result, agreed=agreed)
        running.silent = {
            peer for peer, fault in combined.rejected.items() if fault == ContributionFault.SILENT
        }
        running.closed = running.tally.holdings(closed=True)
        self._answers.tell()
        self._count(combined)
        return combined

    async def compare(
        self, digest: str, exchange: StageIteration, replicas: Sequence[str], *, before: str = ""
    ) -> ReplicaVote:
        """Implements `GradientExchange.compare`; where replicas differ, replica_vote.py decides."""
        own, weights = self._key.peer_id, ReplicaWeights(digest, before)
        self._answers.weigh(exchange, weights)
        others = sorted(set(replicas) - {own})
        running = self._answers.running(exchange)
        dead = running.silent if running is not None else set[str]()
        patient_s, short_s = self._settings.contribution_timeout_s, self._settings.round_timeout_s
        async with asyncio.TaskGroup() as tasks:
            asked = {
                peer: tasks.create_task(
                    self._weights_of(peer, exchange, short_s if peer in dead else patient_s)
                )
                for peer in others
            }
        said = {peer: found for peer, task in asked.items() if (found := task.result()) is not None}
        if running is not None:
            running.tally.release()
        silent = [peer for peer in others if peer not in said]
        return agreement_of(own, {own: weights, **said}, silent)

    async def _own(
        self, own: GradientSum, exchange: StageIteration, expected: ContributionBounds
    ) -> Contribution:
        codec = self._settings.codec
        try:
            return await asyncio.to_thread(contribute, own, exchange, expected, self._key, codec=codec)
        except Rejected as rejected:
            logger.warning("our gradients of iteration %d are left out: %s", exchange.iteration, rejected)
            self.counters.rejected[fault_of(rejected)] += 1
            return contribute(NOTHING, exchange, expected, self._key)

    async def _gather(self, running: AveragingUnderWay) -> list[str]:
        """Ask all replicas for their contribution at once. Returns those that answered at all."""
        others = [peer for peer in running.tally.replicas if peer != self._key.peer_id]
        async with asyncio.TaskGroup() as tasks:
            asked = {peer: tasks.create_task(self._first_of(peer, running)) for peer in others}
        return [peer for peer, task in asked.items() if task.result()]

    async def _first_of(self, peer_id: str, running: AveragingUnderWay) -> bool:
        tally = running.tally
        try:
            tally.add(await self._fetch(peer_id, peer_id, tally))
        except (NetworkError, MemberRefused):
            tally.fail(peer_id, ContributionFault.SILENT)
            return False
        except Rejected as rejected:
            tally.fail(
                peer_id, ContributionFault.SILENT if rejected.reason == NOT_HERE else fault_of(rejected)
            )
        return True

    async def _fetch(self, peer_id: str, author: str, tally: ContributionTally) -> Contribution:
        """Return the contribution of the replica `author`, fetched from any replica. Raises Rejected,
        NetworkError."""
        exchange, heads = tally.exchange, list[SignedHead]()

        def body_bytes(sealed: bytes) -> int:
            if not sealed:
                raise Rejected(NOT_HERE, f"{peer_id} has nothing of {author}")
            signed = open_head(sealed, exchange, among=tally.replicas, author=author)
            heads.append(signed)
            tally.note(signed)
            return size_bytes(signed.head, tally.expected)

        question = AskGradients(exchange, author)
        body = AnswerBody(body_bytes)
        await self._streams.ask(
            peer_id, MemberService.GRADIENTS, question, bytes, timeout_s=self._fetch_s(tally), body=body
        )
        try:
            return await asyncio.to_thread(read_values, heads[0], body.data, tally.expected)
        except Rejected as rejected:
            if rejected.reason != ContributionFault.BAD_DIGEST:
                tally.fail(author, fault_of(rejected), heads[0])
            raise

    async def _agree(self, running: AveragingUnderWay, answering: Sequence[str]) -> bool:
        """Carry out step 2. Returns True if all replicas that answer hold the same set in the end."""
        tally = running.tally
        for number in range(MAX_ROUNDS):
            running.published.append(tally.holdings())
            self._answers.tell()
            heard = await self._hear(running, answering, number)
            answering = list(heard)
            views = {peer: tally.learn(peer, holdings) for peer, holdings in heard.items()}
            await self._fetch_lacking(tally)
            if all(tally.same(view) for view in views.values()):
                return True
            tally.adopt([views[peer] for peer, holdings in heard.items() if holdings.closed])
            if tally.adopted:
                return True
        return False

    async def _hear(
        self, running: AveragingUnderWay, answering: Sequence[str], number: int
    ) -> dict[str, SeenHeads]:
        """Return the holdings of each replica at the end of a round. A replica that does not answer is left
        out from here on."""
        async with asyncio.TaskGroup() as tasks:
            asked = {
                peer: tasks.create_task(self._holdings_of(peer, running.tally, number)) for peer in answering
            }
        return {peer: found for peer, task in asked.items() if (found := task.result()) is not None}

    async def _holdings_of(self, peer_id: str, tally: ContributionTally, number: int) -> SeenHeads | None:
        question = AskHeldGradients(tally.exchange, number)
        # It may have begun a whole step later than we did, and waited as long for one that is dead.
        timeout_s = (2 if number == 0 else 1) * self._fetch_s(tally) + self._settings.round_timeout_s
        return await self._asked(peer_id, question, SeenHeads, timeout_s)

    async def _fetch_lacking(self, tally: ContributionTally) -> None:
        async with asyncio.TaskGroup() as tasks:
            for signed, holders in tally.lacking():
                tasks.create_task(self._from_any(signed, holders, tally))

    async def _from_any(self, signed: SignedHead, holders: Sequence[str], tally: ContributionTally) -> None:
        for peer_id in holders:
            try:
                tally.add(await self._fetch(peer_id, signed.author, tally))
                return
            except (Rejected, NetworkError):
                tally.doubt(peer_id, signed)

    async def _weights_of(
        self, peer_id: str, exchange: StageIteration, timeout_s: float
    ) -> ReplicaWeights | None:
        question = AskDigest(exchange)
        return await self._asked(peer_id, question, ReplicaWeights, timeout_s)

    async def _asked(
        self, peer_id: str, question: StageQuestion, answer: type[_T], timeout_s: float
    ) -> _T | None:
        """Return a replica's answer; None if it gives none."""
        try:
            return await self._streams.ask(
                peer_id, MemberService.GRADIENTS, question, answer, timeout_s=timeout_s
            )
        except (NetworkError, Rejected):
            return None

    def _fetch_s(self, tally: ContributionTally) -> float:
        """Return the time limit of one contribution: those of all others share the line."""
        many = (len(tally.replicas) - 1) * most_bytes(tally.expected)
        return self._settings.contribution_timeout_s + many / self._settings.least_bytes_per_s

    def _count(self, combined: Combined) -> None:
        self.counters.combined += 1
        self.counters.rejected.update(combined.rejected.values())
        self.counters.disagreements += not combined.agreed

    def _note_late(self) -> None:
        self.counters.stragglers += 1

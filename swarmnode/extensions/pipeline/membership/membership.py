"""A member's part in a pipeline: knows the others, agrees with them on plans, and reports each change.

link_probes.py, costs -> announcements, pings -> [Membership] -> on_agreed -> stages; agreed(k) -> drivers

There is no coordinator. Everyone announces itself, everyone pings everyone; the living member with the
smallest peer id convenes (proposal_round.py), all follow (follower.py), and if it falls silent, or proposes
nothing while all are stopped, the next one does. Plans change between iterations only: training goes on under
the former plan while the next one is computed and its weights are loaded. After a partition both sides go on
alone, and meet again under one plan, with the highest epoch; who was then behind by iterations is told so by
`AgreedPlan.iteration`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from statistics import median_low
from types import TracebackType
from typing import Self

from swarmnode.errors import ModelError, Rejected
from swarmnode.extensions.pipeline.membership.convener import Convener
from swarmnode.extensions.pipeline.membership.follower import Follower
from swarmnode.extensions.pipeline.membership.job_runner import JobRunner, OnAgreed
from swarmnode.extensions.pipeline.membership.known_members import KnownMembers, MembershipSettings
from swarmnode.extensions.pipeline.membership.liveness import LivenessMonitor
from swarmnode.extensions.pipeline.membership.membership_messages import (
    Begin,
    Hold,
    Introduce,
    Leave,
    Ping,
    Presence,
    ProposalProgress,
    Propose,
    Request,
    Status,
    Suspect,
    TakeAssignment,
    topic_of,
)
from swarmnode.extensions.pipeline.membership.own_presence import OwnPresence
from swarmnode.extensions.pipeline.membership.proposal_round import target_iteration
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings, plan_terms
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, FormerStages, PlanInputs
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply, ServiceHandler
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.of_each import of_each
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused, Refusal, Refused
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.extensions.pipeline.wire.waiting import ChangeSignal, loop_s
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Host, Subscription

logger = logging.getLogger(__name__)

QUEUED_MESSAGES = 256


class Membership:
    """Membership in a pipeline for as long as it is entered.

    async with Membership(host, streams, key, settings=..., plan=..., model="qwen", announcement=...,
                          prepare=own_stage.prepare, on_agreed=own_stage.take) as membership:
        plan = await membership.agreed(worker.iteration)

    `on_agreed` takes our assignment: it loads the stage if need be, fetches its state and assigns the member.
    It may raise SwarmnodeError. If `agreed.iteration` differs from that of our weights, they are fetched from
    a replica (state_service.py), or kept if no replica has others. If `part_of(own)` is None, we are a spare
    member.
    """

    def __init__(
        self,
        host: Host,
        streams: MemberStreams,
        key: NodeKey,
        *,
        settings: MembershipSettings,
        plan: PlanSettings,
        model: str,
        announcement: Callable[[], CostAnnouncement],
        prepare: OnAgreed,
        on_agreed: OnAgreed,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`model` names the weights, so that two members with different ones do not mix. `announcement`:
        returns what we announce; its `free_bytes` is all that we give to the pipeline, a stage that we hold
        included. `prepare` is called before `on_agreed`, while training goes on, if there are weights to
        load. `wall_s`: returns the seconds since the epoch."""
        self._host = host
        self._streams = streams
        self._settings = settings
        self._plan = plan
        self._wall_s = wall_s
        named = plan_terms(plan, model)
        self._topic = topic_of(settings.swarm, settings.name)
        self._members = KnownMembers(host.peer_id, settings, self._topic, named)
        self._follower = Follower(host.peer_id, catch_up_s=settings.catch_up_s)
        self._own = OwnPresence(key, self._topic, named, announcement, wall_s)
        self._news = ChangeSignal()
        self._convener = Convener(
            self._members, self._follower, self._own, self._ask, self.status, wall_s, self.lost
        )
        self._liveness = LivenessMonitor(
            self._members, self._ask, self.status, self._convener.turn, self._news
        )
        self._jobs = JobRunner(
            self._follower, self._members, self._news,
            look=self._liveness.look, prepare=prepare, on_agreed=on_agreed,
        )  # fmt: skip
        self._group: asyncio.TaskGroup | None = None
        self._running: list[asyncio.Task[None]] = []
        self._has_left = False
        self._heard: Subscription | None = None
        self.refused: Counter[str] = Counter()
        """Messages of others that were refused, by reason."""

    async def __aenter__(self) -> Self:
        self._own.renew()
        self._convener.start()
        heard = self._heard = await self._host.subscribe(self._topic, queue_size=QUEUED_MESSAGES)
        handler = ServiceHandler(Request, self._answer, knows=None)
        self._streams.incoming.begin(MemberService.MEMBERSHIP, handler)
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        settings = self._settings
        announcing = self._own.publish(self._host, settings.announce_s, settings.ping_s, self._members.living)
        watching = self._liveness.ping_forever(), self._liveness.confirm_forever()
        work = (self._listen(heard), announcing, *watching, self._jobs.run(), self._convene())
        self._running = [self._group.create_task(each) for each in work]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Tell the others that we leave, so that they need not wait for our silence."""
        if self._group is None:
            return
        for task in self._running:
            task.cancel()
        self._running, self._has_left = [], True
        self._news.tell()
        try:
            await self._group.__aexit__(exc_type, exc, tb)
        finally:
            if self._heard is not None:
                await self._heard.aclose()
            answer_s = self._settings.answer_s
            await of_each(self._members.living(), lambda peer: self._liveness.tell(peer, Leave(), answer_s))

    async def agreed(self, iteration: int) -> AgreedPlan:
        """Return the plan for this iteration, in which we are a data node. The iteration counts as running
        from now on.

        Returns at once if nothing changed, otherwise when all members have an assignment under the new plan.
        Raises ModelError if this membership ends first.
        """
        self.rests()
        self.stepped(iteration)
        said = False
        while not (self._follower.may_begin(iteration) and not self._is_outdated()):
            if self._has_left:
                raise ModelError("this membership has ended", hint="ask the one that came after it")
            if not said:
                logger.info("iteration %d waits for a plan: %s", iteration, self._why_waiting())
                said = True
            await self._news.wait()
        plan = self._follower.in_force
        assert plan is not None
        self._follower.busy = True
        if said:
            logger.info(
                "iteration %d continues under plan %s, epoch %d", iteration, plan.digest[:8], plan.epoch
            )
        return plan

    def rests(self) -> None:
        """Declare that the iteration that `agreed` was called for does not run here after all."""
        self._follower.busy = False
        self._news.tell()

    def stepped(self, iteration: int) -> None:
        """Record that our weights are at this iteration. To be called by every member."""
        self._follower.stepped(iteration, loop_s())
        self._news.tell()

    def lost(self, peer_id: str, why: str) -> None:
        """Check at once if a member that did not answer the pipeline lives, and tell the convener if not."""
        self._liveness.suspect(peer_id, why)

    def members(self) -> tuple[str, ...]:
        """Return the peer ids of living members, ours included; sorted."""
        return tuple(sorted((self._host.peer_id, *self._members.living())))

    def presences(self) -> dict[str, Presence]:
        """Return the presences of the other living members."""
        return self._members.presences()

    def status(self) -> Status:
        """Return our status, as it is sent to others."""
        follower, plan = self._follower, self._follower.in_force
        stage = plan.stage_of(self._host.peer_id) if plan else None
        return Status(
            session=self._own.session,
            sequence=self._own.sequence,
            iteration=follower.iteration,
            busy=follower.busy,
            in_force=plan.epoch if plan else 0,
            plan=plan.digest if plan else "",
            stage=-1 if stage is None else stage,
            ends=plan.as_former.ends if plan else (),
            epoch=follower.epoch,
            progress=follower.progress,
            proposed=follower.proposed.digest if follower.proposed else "",
            detail=follower.detail,
            resigned=self._convener.is_resigned,
        )

    # What is heard.

    async def _listen(self, heard: Subscription) -> None:
        async for message in heard:
            try:
                self._members.allow(message.sender, loop_s())
                if message.oversized:
                    raise Rejected(Refusal.TOO_LARGE, "a gossip message over the bound of the network")
                self._introduce(message.data, message.sender)
            except Rejected as error:
                self._refuse(message.sender, error)

    async def _answer(self, incoming: Incoming[Request]) -> Reply:
        peer_id = incoming.peer_id
        try:
            if not self._running:
                raise Rejected(Refusal.LEFT, f"no part in pipeline {self._settings.name} any more")
            self._members.allow(peer_id, loop_s())
            self._take(peer_id, incoming.message)
        except Rejected as error:
            self._refuse(peer_id, error)
            raise
        return Reply(self.status())

    def _take(self, sender: str, request: Request) -> None:
        """Carry out a request of a member, possibly our own. Raises Rejected."""
        now_s, follower = loop_s(), self._follower
        if isinstance(request, Introduce):
            self._introduce(request.presence, sender)
        elif sender != self._host.peer_id and sender not in self._members:
            raise Rejected(Refusal.UNKNOWN_MEMBER, "introduce yourself first")
        match request:
            case Ping() if sender != self._host.peer_id:
                if not self._members.heard(sender, request.status, now_s):
                    raise Rejected(Refusal.UNKNOWN_MEMBER, "introduce yourself again")
                follower.hear(sender, request.status, now_s)
            case Propose():
                self._propose(sender, request, now_s)
            case Hold():
                self._hold(sender, request, now_s)
            case TakeAssignment():
                follower.take(sender, request.epoch, request.iteration, now_s)
            case Begin():
                follower.begin(sender, request.epoch, now_s)
            case Suspect():
                self.lost(request.peer_id, f"{sender} could not reach it")
            case Leave():
                self._members.left(sender, now_s)
            case _:
                pass
        self._news.tell()

    def _introduce(self, sealed: bytes, sender: str) -> None:
        news = self._members.introduce(sealed, sender=sender, wall_s=self._wall_s(), now_s=loop_s())
        if news:
            self._news.tell()

    def _propose(self, sender: str, proposal: Propose, now_s: float) -> None:
        # We may have been stopped for a shorter time than the sender.
        members, follower, convener = self._members, self._follower, self._convener.turn(0.5)
        if sender > convener or not members.may_convene(sender, now_s):
            raise Rejected(Refusal.NOT_CONVENER, f"{convener} lives and convenes")
        announcements = members.check_proposal(
            proposal, sender, session=self._own.session, wall_s=self._wall_s(), now_s=now_s
        )
        former = FormerStages(proposal.ends, proposal.stage_of) if proposal.ends else None
        inputs = PlanInputs(announcements, self._plan, former, proposal.epoch)
        heard = members.statuses()
        epochs = [each.epoch for peer, each in heard.items() if peer != sender]
        follower.propose(sender, inputs, now_s, usual_epoch=median_low(epochs) if epochs else 0)
        for peer, status in heard.items():
            # Who was told before us may have computed it already.
            follower.hear(peer, status, now_s)

    def _hold(self, sender: str, request: Hold, now_s: float) -> None:
        # As the convener itself does (proposal_round.py), from what we have heard ourselves.
        expected = target_iteration([self.status(), *self._members.statuses().values()])
        try:
            self._follower.hold(sender, request.epoch, request.iteration, now_s, expected=expected)
        except Rejected as error:
            if error.reason == Refusal.ITERATION_LEAP:
                self._members.pass_over(sender, str(error), now_s)
                self._follower.failed(request.epoch, str(error))
            raise

    def _refuse(self, peer_id: str, error: Rejected) -> None:
        self.refused[error.reason] += 1
        if error.reason == Refusal.OTHER_VERSION:
            self._members.tell(peer_id, str(error))
        logger.debug("refused what %s sent: %s", peer_id, error)

    # What is asked.

    async def _ask(self, peer_id: str, request: Request, timeout_s: float) -> Status:
        """Send a member, possibly ourselves, a request. One that does not know us is told first. Raises
        MemberRefused, NetworkError."""
        if peer_id == self._host.peer_id:
            try:
                self._take(peer_id, request)
            except Rejected as error:
                raise MemberRefused(Refused.of(error)) from error
            return self.status()

        async def exchange(message: Request) -> Status:
            service = MemberService.MEMBERSHIP
            return await self._streams.ask(peer_id, service, message, Status, timeout_s=timeout_s)

        try:
            status = await exchange(request)
        except MemberRefused as refused:
            if refused.refusal is not Refusal.UNKNOWN_MEMBER:
                raise
            await exchange(Introduce(self._own.sealed))
            status = await exchange(request)
        self._members.heard(peer_id, status, loop_s())
        self._follower.hear(peer_id, status, loop_s())
        return status

    # What goes on all the time.

    async def _convene(self) -> None:
        while True:
            await self._news.pause(self._settings.poll_s)
            if await self._convener.run():
                self._news.tell()

    def _is_outdated(self) -> bool:
        """Return True if most others follow a newer plan, so that we were left out and wait to be taken in
        again."""
        plan = self._follower.in_force
        return plan is not None and self._members.most_are_past(plan.epoch)

    def _why_waiting(self) -> str:
        follower = self._follower
        if follower.in_force is None:
            others = len(self._members.living())
            return f"no assignment yet, {others} other members, {self._convener.turn()} convenes"
        if follower.progress in (ProposalProgress.HELD, ProposalProgress.READY):
            return f"{follower.by} is changing it, epoch {follower.epoch}"
        return "the others go by a newer one" if self._is_outdated() else "we are spare in the present one"

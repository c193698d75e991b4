"""Decides if it is our turn to propose a plan and if one is due, and draws the conclusions of the round.

known_members.py, follower.py -> [Convener] -> proposal_round.py -> who is left out, whether we resign

A death is planned around at once, newcomers once no more of them come, or have come for long enough. Inputs
that gave no plan are not tried again before something changes, or a while has passed. Whoever says that
another proposal is coming is believed for as long as it takes to notice a death; whoever leaves the plan that
it has just helped to begin is asked, and left out. Who turns out to do nothing is a reason to plan, too:
that it has no stage under the next plan is then what every member computes for itself.

Whoever has the turn may have reasons not to propose that we do not see. So its turn passes only while we are
stopped, only for the next plan, and only if most members have seen the same; nobody is barred for it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import NetworkError
from swarmnode.extensions.pipeline.membership.follower import Follower
from swarmnode.extensions.pipeline.membership.known_members import KnownMembers
from swarmnode.extensions.pipeline.membership.membership_messages import (
    MAX_MEMBERS,
    Ask,
    Ping,
    ProposalProgress,
    Propose,
    Status,
)
from swarmnode.extensions.pipeline.membership.own_presence import OwnPresence
from swarmnode.extensions.pipeline.membership.proposal_round import (
    ProposalRound,
    RoundOutcome,
    former_stages,
    next_epoch,
)
from swarmnode.extensions.pipeline.plans.member_costs import is_fresh
from swarmnode.extensions.pipeline.plans.observations import useless_members
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused
from swarmnode.extensions.pipeline.wire.waiting import loop_s

logger = logging.getLogger(__name__)

MAX_AGAIN = 2
"""Rounds in a row that may end because of one member. The next is held without it; it is not left out sooner
because it may be the only one that has its layers."""

SETTLED_AFTER = 3
"""Factor of `settle_s`: so long after the first newcomer no others are waited for, as they may never stop
coming."""

IDLE_AFTER = 2
"""Factor of `retry_s`: so long a member may have the turn and propose nothing while we are stopped, before it
passes to the next one. After half of that we take the proposal of one who has been stopped for longer."""

NO_CHANGE = frozenset({ProposalProgress.NONE, ProposalProgress.BEGUN, ProposalProgress.FAILED})
"""How far a member is with the latest proposal while no change of plan is under way."""

RESIGNED_FOR = 10
"""Factor of `barred_s`: so long we do not convene after most members computed another plan than we did."""


class OutbidReports:
    """Members that report another convener's proposal, and since when without a plan coming of it."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._in_force = 0

    def told(self, by: Iterable[str], in_force: int, now_s: float) -> dict[str, float]:
        """Record the members that report one now, under the plan of epoch `in_force`. Returns by peer for how
        many seconds."""
        before = self._since_s if in_force == self._in_force else {}
        self._since_s = {peer: before.get(peer, now_s) for peer in by}
        self._in_force = in_force
        return {peer: now_s - since_s for peer, since_s in self._since_s.items()}


class Convener:
    """Convenes a change of plan whenever it is our turn."""

    def __init__(
        self,
        members: KnownMembers,
        follower: Follower,
        presence: OwnPresence,
        ask: Ask,
        status: Callable[[], Status],
        wall_s: Callable[[], float],
        suspect: Callable[[str, str], None],
    ) -> None:
        """`suspect`: called with a member that does not answer and the reason."""
        self._members = members
        self._follower = follower
        self._presence = presence
        self._ask = ask
        self._status = status
        self._wall_s = wall_s
        self._suspect = suspect
        self._started_at_s = 0.0
        self._resigned_until_s = 0.0
        self._fruitless: tuple[frozenset[tuple[str, int]], float] = (frozenset(), 0.0)
        self._again: Counter[str] = Counter()
        self._outbid = OutbidReports()
        self._strayed: Counter[str] = Counter()
        self._begun: tuple[frozenset[tuple[str, int]], str] = (frozenset(), "")
        """Members of the last plan that we brought into force, and its digest."""
        self._due_since_s: float | None = None
        self._idle_since_s = BoundedDict[str, float](MAX_MEMBERS)
        """Time since which each member that has had the turn proposes nothing while we are stopped."""
        self._idle_at = 0
        """Our iteration when we last looked for such members."""
        self._judged: frozenset[str] = frozenset()
        """Members that our last plans left out because they do nothing. Each is left out once."""

    def start(self) -> None:
        """Begin to listen for members, which must last a while before it can be our turn."""
        self._started_at_s = loop_s()

    @property
    def is_resigned(self) -> bool:
        return loop_s() < self._resigned_until_s

    def turn(self, share: float = 1.0) -> str:
        """Return the peer id of the member that has the turn to convene. `share`: that of the time after
        which an idle one loses it."""
        return self._members.convener(loop_s(), resigned=self.is_resigned, without=self._idle(share))

    async def run(self) -> bool:
        """Convene if it is our turn and a plan is due. Returns False if not."""
        self._watch()
        idle = self._idle()
        others = [
            peer
            for peer in self._members.usable(loop_s())
            if peer not in idle and is_fresh(self._members[peer].presence.costs.member, self._wall_s())
        ]
        if not (self._is_due(others) and self._most_follow(others)):
            return False
        useless = self._useless(others)
        if not useless and await self._bar_deserters(others):
            return True
        if idle:
            logger.warning(
                "planning without %s: it was their turn to propose, and they did not", ", ".join(sorted(idle))
            )
        if useless:
            logger.warning(
                "planning without %s: they accept micro-batches but do not process them", ", ".join(useless)
            )
        if await self._hold_round(others):
            self._judged |= {*useless}
        self._due_since_s = None
        return True

    def _watch(self) -> None:
        """Note who has the turn, while we are stopped and nobody's proposal is under way."""
        follower, members = self._follower, self._members
        steps, self._idle_at = follower.iteration != self._idle_at, follower.iteration
        # Where steps are taken, a data node is at work that we do not reach.
        if steps or not members.is_stopped(follower.in_force):
            self._idle_since_s.clear()
        elif follower.progress not in NO_CHANGE and follower.by in members.living():
            self._idle_since_s.pop(follower.by, None)
        elif (turn := self.turn()) != members.own and turn not in self._idle_since_s:
            self._idle_since_s[turn] = loop_s()

    def _idle(self, share: float = 1.0) -> frozenset[str]:
        """Return members whose turn has passed. One that says that a change is under way, which we may not be
        part of, has as long as for that."""
        now_s, settings, told = loop_s(), self._members.settings, self._members.statuses()
        found: set[str] = set()
        for peer, since_s in self._idle_since_s.items():
            changes = peer in told and told[peer].progress not in NO_CHANGE
            limit_s = settings.prepare_s if changes else IDLE_AFTER * settings.retry_s
            if now_s - since_s > share * limit_s:
                found.add(peer)
        return frozenset(found)

    def _most_follow(self, others: list[str], *, but: int = 0) -> bool:
        """Return True if these members, `but` so many that refuse it, and we are most of those that live, or
        if we need not be: nobody has let its turn pass."""
        idle = self._idle().intersection(self._members.usable(loop_s()))
        return not idle or 2 * (1 + len(others) - but) > 1 + len(others) + len(idle)

    def _is_due(self, others: list[str]) -> bool:
        now_s, settings = loop_s(), self._members.settings
        if self.turn() != self._members.own or self.is_resigned:
            return False
        if now_s < self._started_at_s + settings.settle_s:
            return False
        statuses = self._statuses(others)
        if self._is_in_force(statuses) and not self._useless(others):
            self._due_since_s = None
            return False
        if not any(each.in_force for each in statuses.values()) and len(statuses) < settings.at_least:
            return False
        if self._due_since_s is None:
            self._due_since_s = now_s
        waited_s = now_s - self._due_since_s
        joined = {peer: self._members[peer].joined_at_s for peer in others}
        newest_s = max(joined.values(), default=self._started_at_s)
        unsettled = newest_s > self._members.gone_at_s and now_s < newest_s + settings.settle_s
        if unsettled and waited_s < SETTLED_AFTER * settings.settle_s:
            return False
        unmeasured = [peer for peer in others if not self._members[peer].presence.costs.links]
        comes = any(now_s < joined[peer] + settings.links_s for peer in unmeasured)
        if comes and waited_s < settings.links_s:
            return False
        tried, again_at_s = self._fruitless
        return tried != self._sessions(others) or now_s >= again_at_s

    def _is_in_force(self, statuses: dict[str, Status]) -> bool:
        """Return True if exactly these members work under the plan that we work under."""
        plan = self._follower.in_force
        if plan is None or self._follower.progress != ProposalProgress.BEGUN:
            return False
        return plan.members == set(statuses) and all(each.plan == plan.digest for each in statuses.values())

    def _useless(self, others: list[str]) -> list[str]:
        """Return members with a stage that do nothing, by the word of data nodes, unless they were left out
        before."""
        plan = self._follower.in_force
        if plan is None:
            return []
        said = [self._presence.announced, *(self._members[peer].presence.costs for peer in others)]
        found = useless_members(said, plan.as_former.stage_of) & {*plan.peers}
        self._judged &= found
        return sorted(found - self._judged)

    async def _bar_deserters(self, others: list[str]) -> bool:
        """Bar members of our last plan that left it without reason. Returns True if any was barred, or if
        none has left it after all."""
        sessions, digest = self._begun
        plan = self._follower.in_force
        if plan is None or plan.digest != digest or sessions != self._sessions(others):
            return False
        if self._follower.progress != ProposalProgress.BEGUN:
            return False
        told = self._statuses(others)
        barred = False
        # Bounded: who is gone is forgotten here.
        self._strayed = Counter({peer: self._strayed[peer] for peer in others})
        for peer in [peer for peer in others if peer not in told or told[peer].plan != digest]:
            why = await self._what_became_of(peer, plan)
            if why:
                self._members.bar(peer, why, loop_s())
                barred = True
        # Who was lost meanwhile counts with what it said before.
        return barred or self._is_in_force(told | self._statuses(others))

    async def _what_became_of(self, peer: str, plan: AgreedPlan) -> str:
        """Return the reason to bar a member that seems to have left the plan; empty if there is none."""
        try:
            status = await self._ask(peer, Ping(self._status()), self._members.settings.answer_s)
        except (NetworkError, MemberRefused) as error:
            logger.debug("%s does not say where it stands: %s", peer, error)
        else:
            if status.plan == plan.digest:
                return ""
            if status.epoch <= plan.epoch:
                return "it left a plan that it had begun"
        # Another convener's proposal may have taken it along, but not time after time.
        self._strayed[peer] += 1
        return "it leaves one plan after the other" if self._strayed[peer] > MAX_AGAIN else ""

    async def _hold_round(self, others: list[str]) -> bool:
        """Hold one round. Returns True if another plan has begun."""
        statuses, sessions = self._statuses(others), self._sessions(others)
        self._presence.try_renew()
        former = former_stages(statuses)
        proposal = Propose(
            epoch=next_epoch(self._follower.epoch, statuses.values()),
            ends=former.ends if former else (),
            stage_of=dict(former.stage_of) if former else {},
            presences=(self._presence.sealed, *(self._members[peer].sealed for peer in others)),
        )
        own, settings = self._members.own, self._members.settings
        logger.info(
            "proposing plan %d of pipeline %s to %d others", proposal.epoch, settings.name, len(others)
        )
        round_ = ProposalRound(self._ask, own, (own, *others), settings, lambda: self._follower.proposed)
        outcome = await round_.run(proposal)
        if own in outcome.failed or not self._most_follow(others, but=len(outcome.outbid)):
            # Whoever let its turn pass has no plan either, or only we are stopped.
            self._idle_since_s.clear()
            outcome.outbid.clear()
        await self._ask_again(outcome)
        await self._wait_for_better(outcome, proposal.epoch)
        plan = self._follower.in_force
        if outcome.begun and plan is not None:
            self._begun = sessions, plan.digest
        self._conclude(outcome, sessions)
        return outcome.begun

    async def _wait_for_better(self, outcome: RoundOutcome, epoch: int) -> None:
        """Wait for the better proposal that members report. Fail those that report one for too long: they
        keep us from planning."""
        follower, settings = self._follower, self._members.settings
        ends_at_s = loop_s() + settings.confirm_s
        while outcome.outbid:
            if (follower.epoch, follower.by) != (epoch, self._members.own):
                self._outbid = OutbidReports()
                return
            if loop_s() >= ends_at_s:
                break
            await asyncio.sleep(min(settings.poll_s, settings.confirm_s))
        in_force = follower.in_force.epoch if follower.in_force else 0
        for peer, for_s in self._outbid.told(outcome.outbid, in_force, loop_s()).items():
            # So long a member may honestly take the dead for the living.
            if for_s > settings.silence_s + settings.answer_s:
                why = outcome.outbid[peer]
                outcome.failed[peer] = f"spoke for {for_s:.0f} s of another proposal: {why}"
                self._outbid = OutbidReports()

    async def _ask_again(self, outcome: RoundOutcome) -> None:
        """Ask members that ended a round for their status before the next one, since it may have changed.
        Fail those that ended too many."""
        self._again = Counter({peer: self._again[peer] + 1 for peer in outcome.again})
        for peer, why in outcome.again.items():
            if self._again[peer] > MAX_AGAIN:
                outcome.failed[peer] = why
                continue
            logger.info("%s ended the change of plan, starting another: %s", peer, why)
            try:
                await self._ask(peer, Ping(self._status()), self._members.settings.answer_s)
            except NetworkError as error:
                self._suspect(peer, str(error))
                # Before it is planned with again, there is time to see whether it lives.
                await asyncio.sleep(self._members.settings.confirm_s)
            except MemberRefused as error:
                logger.debug("%s does not say where it stands: %s", peer, error)

    def _conclude(self, outcome: RoundOutcome, sessions: frozenset[tuple[str, int]]) -> None:
        now_s, settings = loop_s(), self._members.settings
        if outcome.resign:
            self._resigned_until_s = now_s + RESIGNED_FOR * settings.barred_s
            logger.error(
                "most members of pipeline %s computed a different plan: is this another version of "
                "swarmnode? The next member convenes",
                settings.name,
            )
        for peer, why in outcome.failed.items():
            if peer == self._members.own:
                self._fruitless = sessions, now_s + settings.retry_s
                logger.error("no plan for the %d members of %s: %s", len(sessions) + 1, settings.name, why)
            elif peer in self._members.living():
                self._members.bar(peer, why, now_s)

    def _statuses(self, others: list[str]) -> dict[str, Status]:
        told = self._members.statuses()
        return {self._members.own: self._status(), **{peer: told[peer] for peer in others if peer in told}}

    def _sessions(self, others: list[str]) -> frozenset[tuple[str, int]]:
        return frozenset((peer, self._members[peer].presence.session) for peer in others)

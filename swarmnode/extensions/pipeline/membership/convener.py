"""Decides if it is our turn to propose a plan and if one is due, and draws the conclusions of the round.

known_members.py, follower.py -> [Convener] -> proposal_round.py -> who is left out, whether we resign

A death is planned around at once, newcomers once no more of them come, or have come for long enough. Inputs
that gave no plan are not tried again before something changes, or a while has passed. Whoever says that
another proposal is coming is believed for as long as it takes to notice a death; whoever leaves the plan that
it has just helped to begin is asked, and left out. Who turns out to do nothing is a reason to plan, too:
that it has no stage under the next plan is then what every member computes for itself. Where most members
compute another plan than we do, our membership ends with an error, and the next member convenes.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from swarmnode.errors import PipelineError
from swarmnode.extensions.pipeline.membership.follower import Follower
from swarmnode.extensions.pipeline.membership.known_members import KnownMembers
from swarmnode.extensions.pipeline.membership.membership_messages import ProposalProgress, Propose, Status
from swarmnode.extensions.pipeline.membership.own_presence import OwnPresence
from swarmnode.extensions.pipeline.membership.proposal_round import (
    Ask,
    ProposalRound,
    RoundOutcome,
    former_stages,
    next_epoch,
)
from swarmnode.extensions.pipeline.plans.member_costs import is_fresh
from swarmnode.extensions.pipeline.plans.observations import useless_members

logger = logging.getLogger(__name__)

MAX_AGAIN = 2
"""Rounds that may end because of one member, until all work under one plan. The next is held without it; it
is not left out sooner because it may be the only one that has its layers."""

SETTLED_AFTER = 3
"""Factor of `settle_s`: so long after the first newcomer no others are waited for, as they may never stop
coming."""


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
        """`suspect`: called with a member whose status is to be asked for, and the reason."""
        self._members = members
        self._follower = follower
        self._presence = presence
        self._ask = ask
        self._status = status
        self._wall_s = wall_s
        self._suspect = suspect
        self._started_at_s = 0.0
        self._fruitless: tuple[frozenset[tuple[str, int]], float] = (frozenset(), 0.0)
        self._again: Counter[str] = Counter()
        """Rounds that a member has ended, or left the plan of, since all worked under one plan."""
        self._outbid_since_s: dict[str, float] = {}
        """Members that report another convener's proposal, and since when without a plan coming of it."""
        self._begun: tuple[frozenset[tuple[str, int]], str] = (frozenset(), "")
        """Members of the last plan that we brought into force, and its digest."""
        self._due_since_s: float | None = None
        self._judged: frozenset[str] = frozenset()
        """Members that our last plans left out because they do nothing. Each is left out once."""

    def start(self) -> None:
        """Begin to listen for members, which must last a while before it can be our turn."""
        self._started_at_s = _now_s()

    def turn(self) -> str:
        """Return the peer id of the member that has the turn to convene."""
        return self._members.convener(_now_s())

    async def run(self) -> bool:
        """Convene if it is our turn and a plan is due. Returns False if not."""
        others = [
            peer
            for peer in self._members.usable(_now_s())
            if is_fresh(self._members[peer].presence.costs.member, self._wall_s())
        ]
        if not self._is_due(others):
            return False
        useless = self._useless(others)
        if not useless and self._bar_deserters(others):
            return True
        if useless:
            logger.warning("planning without %s: they take micro-batches and do nothing", ", ".join(useless))
        if await self._hold_round(others):
            self._judged |= {*useless}
        self._due_since_s = None
        return True

    def _is_due(self, others: list[str]) -> bool:
        now_s, settings = _now_s(), self._members.settings
        if self.turn() != self._members.own:
            return False
        if now_s < self._started_at_s + settings.settle_s:
            return False
        statuses = self._statuses(others)
        if self._is_in_force(statuses) and not self._useless(others):
            self._due_since_s = None
            self._again.clear()
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

    def _bar_deserters(self, others: list[str]) -> bool:
        """Bar members of the last plan that we brought into force which left it without reason, or time after
        time. Returns True if any was barred."""
        sessions, digest = self._begun
        plan, follower = self._follower.in_force, self._follower
        if plan is None or plan.digest != digest or follower.progress != ProposalProgress.BEGUN:
            return False
        if sessions != self._sessions(others):
            return False
        statuses, barred = self._statuses(others), False
        for peer in others:
            status = statuses.get(peer)
            if status is None or status.plan == digest:
                continue
            # Another convener's proposal may have taken it along, but not time after time.
            self._again[peer] += 1
            if status.epoch <= plan.epoch or self._again[peer] > MAX_AGAIN:
                self._members.bar(peer, "it left a plan that it had begun", _now_s())
                barred = True
        return barred

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
        ends_at_s = _now_s() + settings.confirm_s
        while outcome.outbid and _now_s() < ends_at_s:
            if (follower.epoch, follower.by) != (epoch, self._members.own):
                outcome.outbid.clear()
                break
            await asyncio.sleep(min(settings.poll_s, settings.confirm_s))
        now_s = _now_s()
        self._outbid_since_s = {peer: self._outbid_since_s.get(peer, now_s) for peer in outcome.outbid}
        for peer, since_s in self._outbid_since_s.items():
            # So long a member may honestly take the dead for the living.
            if now_s - since_s > settings.silence_s + settings.answer_s:
                outcome.failed[peer] = f"spoke of another proposal: {outcome.outbid[peer]}"

    async def _ask_again(self, outcome: RoundOutcome) -> None:
        """Have members that ended a round looked at before the next one. Fail those that ended too many."""
        self._again.update(outcome.again.keys())
        for peer, why in outcome.again.items():
            if self._again[peer] > MAX_AGAIN:
                outcome.failed[peer] = why
                continue
            logger.info("%s ended the change of plan, another one begins: %s", peer, why)
            self._suspect(peer, why)
        if outcome.again:
            # Before they are planned with again, there is time to see whether they live.
            await asyncio.sleep(self._members.settings.confirm_s)

    def _conclude(self, outcome: RoundOutcome, sessions: frozenset[tuple[str, int]]) -> None:
        now_s, settings = _now_s(), self._members.settings
        if outcome.is_ours_wrong:
            raise PipelineError(
                f"most members of pipeline {settings.name} came to another plan than we did",
                hint="is this swarmnode another version?",
            )
        for peer, why in outcome.failed.items():
            if peer == self._members.own:
                self._fruitless = sessions, now_s + settings.retry_s
                logger.error("no plan for the %d members of %s: %s", len(sessions) + 1, settings.name, why)
            elif peer in self._members.living():
                self._members.bar(peer, why, now_s)

    def _statuses(self, others: list[str]) -> dict[str, Status]:
        known = {peer: self._members[peer].status for peer in others}
        return {self._members.own: self._status(), **{peer: s for peer, s in known.items() if s is not None}}

    def _sessions(self, others: list[str]) -> frozenset[tuple[str, int]]:
        return frozenset((peer, self._members[peer].presence.session) for peer in others)


def _now_s() -> float:
    return asyncio.get_running_loop().time()

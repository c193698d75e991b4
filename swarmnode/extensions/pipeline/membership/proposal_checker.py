"""Checks a proposal: its sender may make it, and it describes the members as they are.

Propose of a convener -> [checked] -> PlanInputs -> follower.py
"""

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.membership.known_members import KnownMembers
from swarmnode.extensions.pipeline.membership.membership_messages import Presence, Propose
from swarmnode.extensions.pipeline.membership.own_presence import OwnPresence
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings
from swarmnode.extensions.pipeline.plans.planning import FormerStages, PlanInputs
from swarmnode.extensions.pipeline.wire.refusals import Refusal


@dataclass(frozen=True, slots=True)
class ProposalChecker:
    """Checks proposals of other members."""

    members: KnownMembers
    own: OwnPresence
    plan: PlanSettings
    turn: Callable[[], str]
    """Returns the peer id of the member that has the turn to convene."""
    wall_s: Callable[[], float]
    """Returns the seconds since the epoch."""

    def checked(self, sender: str, proposal: Propose, now_s: float) -> PlanInputs:
        """Return the inputs of a proposal. Raises Rejected: not_convener, malformed, not_in_it, and as for
        presences."""
        convener = self.turn()
        if sender > convener or not self.members.may_convene(sender, now_s):
            raise Rejected(Refusal.NOT_CONVENER, f"{convener} lives and convenes")
        found: dict[str, Presence] = {}
        for sealed in proposal.presences:
            author, presence = self.members.open(sealed, wall_s=self.wall_s())
            if author in found:
                raise Rejected(Refusal.MALFORMED, f"{author} is in the proposal twice")
            found[author] = presence
        own = found.get(self.members.own)
        if own is None or own.session != self.own.session or sender not in found:
            raise Rejected(Refusal.NOT_IN_IT, "the proposal leaves out whom it is sent to or by")
        for sealed in proposal.presences:
            try:
                self.members.introduce(sealed, sender=None, wall_s=self.wall_s(), now_s=now_s)
            except Rejected as error:
                # We know newer of a third one, or have no room for it: that is not the convener's doing.
                if error.reason not in (Refusal.OLD_NEWS, Refusal.FULL):
                    raise
        former = FormerStages(proposal.ends, proposal.stage_of) if proposal.ends else None
        if former and any(stage >= len(former.ends) for stage in former.stage_of.values()):
            raise Rejected(Refusal.MALFORMED, "a stage without layers")
        announcements = tuple(presence.costs for presence in found.values())
        return PlanInputs(announcements, self.plan, former, proposal.epoch)

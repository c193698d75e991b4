"""The table of other members: their presence, status and losses, and the decisions that follow from them.

gossip, requests, answers -> [KnownMembers] -> whom to ping, whose turn it is to convene, whom to plan with

A member is known by its presence (signed) and lives while it answers. Clocks are given, nothing waits here.
Tables are bounded: the dead make room for the living, strangers are refused once there is none.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.membership.membership_messages import (
    MAX_MEMBERS,
    Presence,
    Propose,
    Status,
    differing,
    open_presence,
)
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

REQUESTS_PER_S = 10.0
REQUESTS_BURST = 200.0
"""Requests that one peer may make at once. A convener asks every member twice a second while it convenes,
others every few seconds."""

MAX_TRACKED_PEERS = 1024
"""Bound of the peers with an allowance. The one that was not heard of for longest is forgotten."""

UNREACHABLE_PINGS = 2
"""Unreachable pings in a row that make a member suspected. Between them lies a moment, in which a daemon is
restarted."""

PING_AGAIN_S = 1.5

FREE_LOSSES = 2
"""Losses after which a member is still welcome at once. After more it waits, twice as long each time."""

MAX_BARRED_S = 600.0

FORGIVEN_S = 300.0
"""Seconds of life after which one loss is forgotten: a machine that was restarted ten times in a month is no
worse."""


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Time limits and bounds by which members find and watch each other. Seconds may differ between
    members."""

    swarm: str
    name: str
    """The pipeline's name within the swarm."""
    allowed: frozenset[str] | None = None
    """Peer ids that may take part. None: every peer that has the same model and settings."""
    at_least: int = 2
    """Members that the first plan waits for."""
    ping_s: float = 3.0
    silence_s: float = 12.0
    """Time without an answer after which a member is lost."""
    answer_s: float = 5.0
    """Deadline of one request."""
    confirm_s: float = 2.0
    """Deadline of the request that confirms a reported loss."""
    announce_s: float = 60.0
    """Time between announcements with nothing new to say."""
    settle_s: float = 5.0
    """Time without another newcomer after which newcomers are planned with."""
    links_s: float = 30.0
    """Time for which a newcomer that has not measured a link yet is waited for."""
    poll_s: float = 0.5
    """Time between two looks at the progress of the others with a proposal."""
    prepare_s: float = 900.0
    """Limit for computing a plan and loading the weights of a new stage, while training goes on."""
    iteration_s: float = 900.0
    """Limit for the end of an iteration that runs while the next plan is agreed on."""
    assignment_s: float = 300.0
    """Limit for taking an assignment, fetching its state included."""
    catch_up_s: float = 60.0
    """Time that a member which is behind waits for its own optimizer step. Then it takes its assignment
    without it."""
    retry_s: float = 30.0
    """Time before inputs that gave no plan are tried again."""
    barred_s: float = 30.0
    """Time for which a member that failed in a round, or was lost repeatedly, is first left out."""


@dataclass(slots=True)
class KnownMember:
    """The entry of one other member."""

    presence: Presence
    sealed: bytes
    joined_at_s: float
    """Time when it began to live, or was first heard of."""
    status: Status | None = None
    """Its latest status while it lives; None before it has answered, and once it is gone."""
    heard_at_s: float = 0.0
    """Time when it last answered or asked."""
    ping_at_s: float = 0.0
    """Time when it is to be pinged next."""
    unreachable: int = 0
    """Pings in a row for which no connection could be made."""
    losses: int = 0
    """Times that it was lost, left, or did not do its part, without those that are forgotten."""
    unforgiven_since_s: float = 0.0
    """Time of the last loss, or when a loss was last forgotten."""
    barred_until_s: float = 0.0
    convenes_from_s: float = 0.0
    """Time before which it may not propose."""

    @property
    def lives(self) -> bool:
        return self.status is not None


class KnownMembers:
    """The other members of the pipeline. `topic`: that presences are signed for. `terms`: settings that must
    be equal."""

    def __init__(self, own: str, settings: MembershipSettings, topic: str, terms: dict[str, str]) -> None:
        self.own = own
        self.settings = settings
        self._topic = topic
        self._terms = terms
        self.gone_at_s = float("-inf")
        """Time when a member was last lost, or left."""
        self._known: dict[str, KnownMember] = {}
        self._allowances = BoundedDict[str, TokenBucket](MAX_TRACKED_PEERS)
        self._told = BoundedDict[str, str](MAX_TRACKED_PEERS)

    def __getitem__(self, peer_id: str) -> KnownMember:
        return self._known[peer_id]

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._known

    def allow(self, peer_id: str, now_s: float) -> None:
        """Count one request or message of a peer. Raises Rejected: too_often."""
        bucket = self._allowances.get(peer_id) or TokenBucket(REQUESTS_PER_S, REQUESTS_BURST)
        self._allowances[peer_id] = bucket
        if not bucket.take(now=now_s):
            raise Rejected(Refusal.TOO_OFTEN, f"{peer_id} asks more than {REQUESTS_PER_S:g} times a second")

    def open(self, sealed: bytes, *, wall_s: float) -> tuple[str, Presence]:
        """Return author and content of a presence that may take part. `wall_s`: since the epoch. Raises
        Rejected."""
        author, presence = open_presence(sealed, topic=self._topic, now_s=wall_s)
        if self.settings.allowed is not None and author not in {*self.settings.allowed, self.own}:
            raise Rejected(
                Refusal.NOT_INVITED, f"{author} is not on the list of members of {self.settings.name!r}"
            )
        wrong = differing(self._terms, presence.terms)
        if wrong:
            self.tell(author, f"{wrong}; restart the one that is wrong, with the same model and settings")
            raise Rejected(Refusal.OTHER_TERMS, wrong)
        return author, presence

    def introduce(self, sealed: bytes, *, sender: str, wall_s: float, now_s: float) -> bool:
        """Add the presence that `sender` brings as its own to the table. Returns True if it is that of a
        newcomer or of a restarted member. Raises Rejected."""
        author, presence = self.open(sealed, wall_s=wall_s)
        if sender != author:
            raise Rejected(Refusal.NOT_OWN, f"{sender} brings the presence of {author} as its own")
        return self._add(author, presence, sealed, now_s)

    def _add(self, author: str, presence: Presence, sealed: bytes, now_s: float) -> bool:
        """Add an opened presence, as `introduce`. Raises Rejected: old_news, full."""
        if author == self.own:
            return False
        before = self._known.get(author)
        if before is not None and before.presence.session == presence.session:
            if presence.sequence > before.presence.sequence:
                before.presence, before.sealed = presence, sealed
            return False
        if before is not None:
            # An old session may be replayed by others: only news of a later measurement replace it.
            if presence.costs.member.measured_at_s < before.presence.costs.member.measured_at_s:
                raise Rejected(Refusal.OLD_NEWS, f"an earlier session of {author}")
            before.presence, before.sealed = presence, sealed
            before.status, before.joined_at_s, before.ping_at_s = None, now_s, now_s
            return True
        self._make_room()
        self._known[author] = KnownMember(presence, sealed, joined_at_s=now_s, ping_at_s=now_s)
        return True

    def check_proposal(
        self, proposal: Propose, sender: str, *, session: int, wall_s: float, now_s: float
    ) -> tuple[CostAnnouncement, ...]:
        """Return the announcements of a proposal, and take its presences for news. `session`: ours.

        Raises Rejected: malformed, not_in_it, and as for presences.
        """
        found: dict[str, Presence] = {}
        for sealed in proposal.presences:
            author, presence = self.open(sealed, wall_s=wall_s)
            if author in found:
                raise Rejected(Refusal.MALFORMED, f"{author} is in the proposal twice")
            found[author] = presence
        own = found.get(self.own)
        if own is None or own.session != session or sender not in found:
            raise Rejected(Refusal.NOT_IN_IT, "the proposal leaves out whom it is sent to or by")
        if any(stage >= len(proposal.ends) for stage in proposal.stage_of.values()):
            raise Rejected(Refusal.MALFORMED, "a stage without layers")
        for (author, presence), sealed in zip(found.items(), proposal.presences, strict=True):
            try:
                self._add(author, presence, sealed, now_s)
            except Rejected as error:
                # We know newer of a third one, or have no room for it: that is not the convener's doing.
                if error.reason not in (Refusal.OLD_NEWS, Refusal.FULL):
                    raise
        return tuple(presence.costs for presence in found.values())

    def heard(self, peer_id: str, status: Status, now_s: float) -> bool:
        """Record a member's status. Returns False if its newest presence is not known here."""
        known = self._known.get(peer_id)
        if known is None or known.presence.session != status.session:
            return False
        if not known.lives:
            known.joined_at_s, known.ping_at_s = now_s, now_s + self.settings.ping_s
            logger.info("%s takes part in pipeline %s", peer_id, self.settings.name)
        known.status, known.heard_at_s, known.unreachable = status, now_s, 0
        return known.presence.sequence >= status.sequence

    def unreachable(self, peer_id: str, now_s: float) -> bool:
        """Record that no connection to a member could be made, and ping it again soon. Returns True if it may
        be gone."""
        known = self._known.get(peer_id)
        if known is None or not known.lives:
            return False
        known.unreachable += 1
        known.ping_at_s = min(known.ping_at_s, now_s + PING_AGAIN_S)
        return known.unreachable >= UNREACHABLE_PINGS

    def lost(self, peer_id: str, why: str, now_s: float) -> bool:
        """Record that a member is gone. Returns False if that was known, or if it never took part."""
        known = self._known.get(peer_id)
        if known is None or not known.lives:
            return False
        self._gone(known, now_s)
        logger.warning("lost %s from pipeline %s: %s; planning without it", peer_id, self.settings.name, why)
        return True

    def left(self, peer_id: str, now_s: float) -> None:
        """Record that a member has left."""
        known = self._known.get(peer_id)
        if known is not None and known.lives:
            # Not forgotten: who comes and goes is lost again and again like anybody else.
            self._gone(known, now_s)
            logger.info("%s left pipeline %s", peer_id, self.settings.name)

    def bar(self, peer_id: str, why: str, now_s: float) -> None:
        """Leave out a member for a while that lives but does not do its part."""
        known = self._known.get(peer_id)
        if known is not None:
            _lose(known, now_s)
            self._bar(known, known.losses, now_s)
            wait_s = known.barred_until_s - now_s
            logger.warning("leaving %s out of pipeline plans for %.0f s: %s", peer_id, wait_s, why)

    def pass_over(self, peer_id: str, why: str, now_s: float) -> None:
        """Bar a convener that keeps the others from working, and refuse its proposals for as long."""
        self.bar(peer_id, why, now_s)
        known = self._known.get(peer_id)
        if known is not None:
            known.convenes_from_s = known.barred_until_s

    def may_convene(self, peer_id: str, now_s: float) -> bool:
        """Return True if a member may propose when it is its turn."""
        known = self._known.get(peer_id)
        return known is None or known.convenes_from_s <= now_s

    def silent(self, now_s: float) -> list[str]:
        """Return members that live as far as we knew but have been silent for too long."""
        limit_s = now_s - self.settings.silence_s
        return [peer for peer, known in self._known.items() if known.lives and known.heard_at_s < limit_s]

    def due(self, now_s: float) -> list[str]:
        """Return members to ping now, and schedule their next pings; lost ones are pinged more rarely."""
        found = [peer for peer, known in self._known.items() if known.ping_at_s <= now_s]
        for peer in found:
            known = self._known[peer]
            known.ping_at_s = now_s + self.settings.ping_s * (1 if known.lives else 5)
        return found

    def statuses(self) -> dict[str, Status]:
        """Return the latest status of each member that answers, without us; sorted by peer id."""
        return {peer: known.status for peer, known in sorted(self._known.items()) if known.status is not None}

    def living(self) -> list[str]:
        """Return the members that answer, without us; sorted."""
        return [*self.statuses()]

    def presences(self) -> dict[str, Presence]:
        """Return the presence of each other member that answers."""
        return {peer: self._known[peer].presence for peer in self.living()}

    def usable(self, now_s: float) -> list[str]:
        """Return the other members that a plan may count on; sorted."""
        return [peer for peer in self.living() if self._known[peer].barred_until_s <= now_s]

    def most_are_past(self, epoch: int) -> bool:
        """Return True if most other members follow a plan newer than this one."""
        said = self.statuses().values()
        return 2 * sum(each.in_force > epoch for each in said) > len(said)

    def is_stopped(self, plan: AgreedPlan | None) -> bool:
        """Return True if nobody can train under our plan: it is None, or no data node of it answers and still
        works under it. Around a lost member of another stage training goes on."""
        if plan is None:
            return True
        data = {*plan.partition.stages[0].peers}
        works = any(each.in_force >= plan.epoch for peer, each in self.statuses().items() if peer in data)
        return self.own not in data and not works

    def convener(self, now_s: float, *, resigned: bool, without: Collection[str] = ()) -> str:
        """Return the peer id that has the turn: the smallest living one that is not in `without`, including
        ours unless we resigned."""
        said = self.statuses()
        ready = [peer for peer in self.usable(now_s) if not said[peer].resigned and peer not in without]
        return min([*ready, *([] if resigned and ready else [self.own])])

    def _gone(self, known: KnownMember, now_s: float) -> None:
        self.gone_at_s = now_s
        _lose(known, now_s)
        known.status, known.ping_at_s = None, now_s + 5 * self.settings.ping_s
        if known.losses > FREE_LOSSES:
            self._bar(known, known.losses - FREE_LOSSES, now_s)

    def _bar(self, known: KnownMember, times: int, now_s: float) -> None:
        wait_s = min(MAX_BARRED_S, self.settings.barred_s * 2 ** min(times - 1, 16))
        known.barred_until_s = max(known.barred_until_s, now_s + wait_s)

    def _make_room(self) -> None:
        if len(self._known) < MAX_MEMBERS - 1:
            return
        dead = [(known.heard_at_s, peer) for peer, known in self._known.items() if not known.lives]
        if not dead:
            raise Rejected(Refusal.FULL, f"the pipeline has {MAX_MEMBERS} members already")
        del self._known[min(dead)[1]]

    def tell(self, author: str, wrong: str) -> None:
        """Log once why a peer cannot take part, for people who can change it."""
        if self._told.get(author) == wrong:
            return
        self._told[author] = wrong
        logger.warning("%s cannot join pipeline %s with us: %s", author, self.settings.name, wrong)


def _lose(known: KnownMember, now_s: float) -> None:
    """Count one more loss, less those that the member has outlived since."""
    # While it was away nothing is forgotten: it did not prove anything.
    lived_s = (known.heard_at_s if not known.lives else now_s) - known.unforgiven_since_s
    known.losses = max(0, known.losses - int(max(0.0, lived_s) / FORGIVEN_S)) + 1
    known.unforgiven_since_s = now_s

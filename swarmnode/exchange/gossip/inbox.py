"""The entrance of every gossiped header.

HeaderGossip --> [Inbox.hear] -+-> HeaderPool -> choose -> Fetcher -> ReplayBuffer -> Exchange.collect
Neighbourhood -> [Inbox.take_from_neighbour] -+

The inbox first refuses messages that are cheap to refuse and then checks the rest; the order matters. A peer
that may not speak is turned away before a byte is decoded, nothing is remembered of a header until its
signature has been checked, and an author pays only for its own recent messages. Once gossip has forgotten a
signed message, anybody can send it again. So a message that we heard before costs nobody anything, and old
ones come out of a small allowance that all authors share.
"""

from swarmnode.errors import Rejected
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.gossip.header_pool import HeaderPool
from swarmnode.exchange.gossip.helping import Helping
from swarmnode.exchange.limits import (
    LATE_HEADERS_BURST,
    LATE_HEADERS_PER_S,
    LATE_S,
    MAX_CLOCK_SKEW_S,
    MAX_SEEN,
    TOTAL_HEADERS_BURST,
    TOTAL_HEADERS_PER_S,
)
from swarmnode.exchange.messages import Announcement, Arrival, Given, Header
from swarmnode.exchange.peers.recently_seen import RecentlySeen, key_of
from swarmnode.exchange.validation.header_check import check_fits, check_of_use, open_gossip
from swarmnode.network.host import Message
from swarmnode.token_bucket import TokenBucket


class Inbox:
    """Hears messages, and admits the headers that are sound and new to the pool."""

    def __init__(self, context: ExchangeContext, helping: Helping) -> None:
        """`helping` knows the headers whose right answers are wanted even if their rewards are all equal.
        Headers of neighbours do not come from the network but through `take_from_neighbour`."""
        self._context, self._settings, self._ledger = context, context.settings, context.ledger
        self._helping = helping
        self.pool = HeaderPool()
        self._total_rate = {
            proven: TokenBucket(TOTAL_HEADERS_PER_S, TOTAL_HEADERS_BURST) for proven in (False, True)
        }
        self._late_rate = TokenBucket(LATE_HEADERS_PER_S, LATE_HEADERS_BURST)
        # A header stays valid for max_age_s by its author's clock, which may be ahead of ours.
        ttl_s = context.settings.max_age_s + MAX_CLOCK_SKEW_S
        self._heard = RecentlySeen(max_keys=MAX_SEEN, ttl_s=ttl_s)
        """Messages whose signature was checked, whether or not they were admitted."""
        self.seen = {proven: RecentlySeen(max_keys=MAX_SEEN, ttl_s=ttl_s) for proven in (False, True)}
        """Admitted headers, by whether their author was proven: a flood of new names must not make us forget
        headers of authors that we know."""
        self.born_at = 0.0
        """Older headers are not taken from the network: we may have heard them before a restart."""

    def hear(self, message: Message) -> None:
        """Takes in one gossip message, or counts why it was not taken."""
        if message.sender in self._context.neighbourhood:
            return
        self._ledger.headers_seen += 1
        self._ledger.bytes_in += len(message.data)
        try:
            self._hear(message, self._context.arrive())
        except Rejected as rejected:
            self._ledger.drop(rejected.reason, message.sender, rejected.detail)

    def take_from_neighbour(self, author: str, header: Header, sealed: bytes, given: Given) -> None:
        """Takes in a group of another policy of this process, if we can use it."""
        self._ledger.headers_seen += 1
        try:
            check_fits(header, self._settings, self._context.tasks, spread=True)
            self.admit(Announcement(author, header, sealed, self._context.arrive(), given))
        except Rejected as rejected:
            self._ledger.count_unused(Reason(rejected.reason))

    def admit(self, announcement: Announcement) -> None:
        """Adds a checked header to the pool. Raises Rejected: duplicate."""
        self._check_new(announcement)
        self.remember(announcement)
        self._ledger.headers_accepted += 1
        self._ledger.count_unused(Reason.CROWDED_OUT, self.pool.add(announcement))

    def remember(self, announcement: Announcement) -> None:
        """Refuses this header from now on, for as long as its group is remembered. Its author may announce it
        again because somebody asked for help, and must not be blamed for a copy."""
        seen = self.seen[self._context.is_known(announcement.author)]
        seen.renew(_key_of_group(announcement), self._context.arrive().at)

    def _hear(self, message: Message, arrival: Arrival) -> None:
        sender, reputation = message.sender, self._ledger.reputation
        if reputation.is_banned(sender, arrival.at):
            raise Rejected(Reason.BANNED)
        if message.oversized:
            raise Rejected(Reason.GOSSIP_TOO_LARGE, "a gossip message over the bound of the network")
        digest = key_of(message.data)
        if digest in self._heard:
            raise Rejected(Reason.DUPLICATE)
        if not reputation.may_announce(sender, arrival.at):
            raise Rejected(Reason.RATE_LIMITED)
        if not self._total_rate[self._context.is_known(sender)].take(now=arrival.at):
            raise Rejected(Reason.OVER_CAPACITY)
        try:
            header = open_gossip(message.data, sender, arrival.at, self._settings.max_age_s)
            self._context.health.note_header(sender, header)
            spread = not self._helping.is_awaited(header)
            check_of_use(sender, header, self._settings, self._context.tasks, spread=spread)
        except Rejected as rejected:
            reputation.count_header(sender, arrival.at)
            if rejected.reason in _SIGNED:
                self._heard.add(digest, arrival.at)
            raise
        self._heard.add(digest, arrival.at)
        announcement = Announcement(sender, header, message.data, arrival)
        self._check_new(announcement)
        self._charge(announcement)
        self.admit(announcement)

    def _charge(self, announcement: Announcement) -> None:
        """Takes a new header from the allowance that applies to it. Raises Rejected."""
        now, created_s = announcement.arrival.at, announcement.header.created_s
        self.born_at = min(self.born_at, now)  # A clock that was ahead at our start may have been set back.
        if created_s < self.born_at:
            raise Rejected(Reason.BEFORE_OUR_TIME, f"{self.born_at - created_s:.0f} s before we started")
        if created_s >= now - LATE_S:
            self._ledger.reputation.count_header(announcement.author, now)
        elif not self._late_rate.take(now=now):
            raise Rejected(Reason.OVER_CAPACITY, "too many old headers")

    def _check_new(self, announcement: Announcement) -> None:
        identity = _key_of_group(announcement)
        for seen in self.seen.values():
            seen.forget(announcement.arrival.at)
        if any(identity in seen for seen in self.seen.values()):
            raise Rejected(Reason.DUPLICATE)


_SIGNED = frozenset(
    {
        Reason.NOT_A_PUBLISHER,
        Reason.OTHER_PROTOCOL,
        Reason.OTHER_SWARM,
        Reason.OTHER_TASK,
        Reason.OTHER_VERSION,
        Reason.NOT_EXCHANGED,
        Reason.NO_SPREAD,
        Reason.OVERSIZED,
        Reason.EXPIRED,
    }
)
"""Reasons that are found only after the signature was checked, and that stay true of the same bytes."""


def _key_of_group(announcement: Announcement) -> bytes:
    return key_of(announcement.author.encode(), announcement.header.body_hash)

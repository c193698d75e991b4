"""Where every gossiped header comes in: cheap refusals first, then the checks, then the pool.

HeaderPlane ---> [Inbox.hear] -+-> pool -> Fetcher
Neighbourhood -> [Inbox.take] -+

The order matters: who may not speak is turned away before a byte is decoded, and nothing is remembered of a
header until all of it has been checked.
"""

from collections.abc import Callable, Mapping

from swarmnode.errors import Rejected
from swarmnode.exchange.ledger import Ledger
from swarmnode.exchange.limits import MAX_CLOCK_SKEW_S, MAX_SEEN, TOTAL_HEADERS_BURST, TOTAL_HEADERS_PER_S
from swarmnode.exchange.messages import Announcement, Arrival, Given, Header
from swarmnode.exchange.pool import HeaderPool
from swarmnode.exchange.reasons import Reason
from swarmnode.exchange.reputation import TokenBucket
from swarmnode.exchange.seen import RecentlySeen
from swarmnode.exchange.settings import ExchangeSettings
from swarmnode.exchange.validation import check_fits, check_gossip
from swarmnode.network.host import Message
from swarmnode.tasks.task import Task


class Inbox:
    """Hears messages, and admits to the pool what is sound and new."""

    def __init__(
        self,
        pool: HeaderPool,
        ledger: Ledger,
        *,
        settings: ExchangeSettings,
        tasks: Mapping[str, Task],
        arrive: Callable[[], Arrival],
        on_admitted: Callable[[], None],
        is_neighbour: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        """`arrive` stamps what comes in; `on_admitted` is called after each header that entered the pool.
        What a neighbour announces does not come from the network but to `take`."""
        self._pool = pool
        self._ledger = ledger
        self._settings = settings
        self._tasks = tasks
        self._arrive = arrive
        self._on_admitted = on_admitted
        self._is_neighbour = is_neighbour
        self._everybody = TokenBucket(rate_per_s=TOTAL_HEADERS_PER_S, burst=TOTAL_HEADERS_BURST)
        # A header stays valid for max_age_s by its author's clock, which may be ahead of ours.
        self._seen = RecentlySeen(max_keys=MAX_SEEN, ttl_s=settings.max_age_s + MAX_CLOCK_SKEW_S)

    def hear(self, message: Message) -> None:
        """Take in one gossip message, or count why not."""
        if self._is_neighbour(message.sender):
            return
        self._ledger.headers_seen += 1
        self._ledger.bytes_in += len(message.data)
        arrival = self._arrive()
        try:
            self._check_allowance(message.sender, arrival.at)
            announcement = check_gossip(
                message.data, message.sender, arrival, settings=self._settings, tasks=self._tasks
            )
            self.admit(announcement)
        except Rejected as rejected:
            self._ledger.drop(rejected.reason, message.sender, str(rejected))

    def take(self, author: str, header: Header, sealed: bytes, given: Given) -> None:
        """Take in a group of another policy of this process, if it is of use to us."""
        self._ledger.headers_seen += 1
        try:
            check_fits(header, self._settings, self._tasks)
            self.admit(Announcement(author, header, sealed, self._arrive(), given))
        except Rejected as rejected:
            self._ledger.let_go(Reason(rejected.reason))

    def admit(self, announcement: Announcement) -> None:
        """Put a checked header into the pool. Raises Rejected: duplicate."""
        identity = announcement.author.encode() + announcement.header.body_hash
        if not self._seen.add(identity, self._arrive().at):
            raise Rejected(Reason.DUPLICATE)
        self._ledger.headers_accepted += 1
        self._ledger.let_go(Reason.CROWDED_OUT, self._pool.add(announcement))
        self._on_admitted()

    def _check_allowance(self, sender: str, now: float) -> None:
        reputation = self._ledger.reputation
        if reputation.is_banned(sender, now):
            raise Rejected(Reason.BANNED)
        if not reputation.may_announce(sender, now):
            raise Rejected(Reason.RATE_LIMITED)
        if not self._everybody.take(now=now):
            raise Rejected(Reason.OVER_CAPACITY)

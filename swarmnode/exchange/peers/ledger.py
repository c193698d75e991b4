"""The ledger: it counts everything, and is the one place where a Reason has consequences.

gossip, bodies, exchange -> [Ledger] -> Reputation;   ExchangeStats -> status, metrics, log
"""

import logging
from collections.abc import Callable

from swarmnode.exchange.drop_reasons import KNOWN, NOT_NEEDED, Reason
from swarmnode.exchange.exchange_stats import ExchangeCounts
from swarmnode.exchange.peers.reputation import BAN_BELOW, Reputation
from swarmnode.identity.memorable_name import memorable_name

logger = logging.getLogger(__name__)

MOST_LOGGED = 128
"""Once this many are in the log, reasons already logged are not logged for further peers: identities are
free."""

MOST_DETAIL = 300
"""Most characters of a reason and its detail in the log: tasks and peers may have written some of it."""


class Ledger(ExchangeCounts):
    """Counters and reputations, brought together."""

    def __init__(
        self,
        reputation: Reputation,
        clock: Callable[[], float],
        *,
        on_ban: Callable[[str, float], None] = lambda peer, banned_for_s: None,
    ) -> None:
        """`on_ban` is called with each peer that is newly banned, and the seconds that its ban lasts."""
        super().__init__()
        self.reputation = reputation
        self._on_ban = on_ban
        self._clock = clock
        self._logged: set[Reason | tuple[Reason, str]] = set()

    def drop(self, reason: str, peer: str, detail: str = "") -> None:
        """Counts something that was not used, and takes its price from the peer that it came from. The first
        of each reason is logged, so that a count has an example; also the first of each peer, as long as
        there are few."""
        # A task may raise Rejected with words of its own.
        known = Reason(reason) if reason in KNOWN else Reason.INTERNAL
        self.dropped[known] += 1
        if known in NOT_NEEDED:
            return
        self._log_first(known, peer, detail)
        now = self._clock()
        newly_banned = known.points > 0 and self.reputation.punish(peer, known.points, now)
        self.reputation.note_refused(peer, known)
        logger.debug("%s from %s: %s", known, peer, detail)
        if newly_banned:
            logger.warning(
                "%s (%s) is banned for now: its score fell below %.0f, most recently for %s",
                memorable_name(peer),
                peer,
                BAN_BELOW,
                known,
            )
            self._on_ban(peer, self.reputation.banned_for_s(peer, now))

    def _log_first(self, reason: Reason, peer: str, detail: str) -> None:
        if (reason, peer) in self._logged or (reason in self._logged and len(self._logged) >= MOST_LOGGED):
            return
        self._logged |= {reason, (reason, peer)}
        logger.info(
            "%s, from %s (%s): %s; further ones are only counted (docs/metrics.md)",
            "counted against its author" if reason is Reason.FALSE_CLAIM else "not used",
            memorable_name(peer),
            peer,
            f"{reason}: {detail}"[:MOST_DETAIL] if detail else reason,
        )

    def count_unused(self, reason: Reason, count: int = 1) -> None:
        """Counts what left the pool or the buffer unused; nobody is to blame."""
        if count:
            self.dropped[reason] += count

    def accept(self, peer: str) -> None:
        self.accepted += 1
        self.reputation.note_accepted(peer)

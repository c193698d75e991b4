"""The ledger: it counts everything, and is the one place where a Reason has consequences.

gossip, bodies, exchange -> [Ledger] -> Reputation;   ExchangeStats -> status, metrics, log
"""

import logging
from collections.abc import Callable

from swarmnode.exchange.drop_reasons import NOT_NEEDED, PENALTIES, Reason
from swarmnode.exchange.exchange_stats import ExchangeCounts
from swarmnode.exchange.peers.reputation import BAN_BELOW, Reputation
from swarmnode.identity.memorable_name import memorable_name

logger = logging.getLogger(__name__)

_KNOWN = frozenset(Reason)

MOST_DETAIL = 300
"""Most characters of a reason and its detail in the log: tasks and peers may have written some of it."""


class Ledger(ExchangeCounts):
    """Counters and reputations, brought together."""

    def __init__(
        self,
        reputation: Reputation,
        clock: Callable[[], float],
        *,
        on_ban: Callable[[str], None] = lambda peer: None,
    ) -> None:
        """`on_ban` is called with each peer that gets banned."""
        super().__init__()
        self.reputation = reputation
        self._on_ban = on_ban
        self._clock = clock
        self._told: set[Reason] = set()

    def drop(self, reason: str, peer: str, detail: str = "") -> None:
        """Count something that was not used, and take its price from the peer it came from. The first one of
        each reason is told in the log, so that a count has an example."""
        # A task may raise Rejected with words of its own.
        known = Reason(reason) if reason in _KNOWN else Reason.INTERNAL
        self.dropped[known] += 1
        if known not in self._told and known not in NOT_NEEDED:
            self._told.add(known)
            logger.info(
                "not used, from %s (%s): %s; further ones are only counted (docs/metrics.md)",
                memorable_name(peer),
                peer,
                f"{known}: {detail}"[:MOST_DETAIL] if detail else known,
            )
        penalty = PENALTIES.get(known)
        if penalty is None:
            return
        now = self._clock()
        newly_banned = self.reputation.punish(peer, penalty, now)
        logger.debug("%s from %s (score %.0f): %s", known, peer, self.reputation.score(peer, now), detail)
        if newly_banned:
            logger.warning(
                "%s (%s) is banned for now: its score fell below %.0f, at last for %s",
                memorable_name(peer),
                peer,
                BAN_BELOW,
                known,
            )
            self._on_ban(peer)

    def let_go(self, reason: Reason, count: int = 1) -> None:
        """Count what left the pool or the buffer without being used; nobody is to blame."""
        if count:
            self.dropped[reason] += count

    def accept(self, peer: str) -> None:
        self.accepted += 1
        self.reputation.was_accepted(peer)

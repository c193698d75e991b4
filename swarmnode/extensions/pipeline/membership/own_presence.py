"""Our own presence: what we announce about ourselves, signed.

costs, links -> [OwnPresence] -> gossip, introductions, proposals
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from math import inf

from swarmnode.errors import NetworkError, Rejected
from swarmnode.extensions.pipeline.membership.membership_messages import (
    Presence,
    open_presence,
    seal_presence,
)
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement
from swarmnode.extensions.pipeline.plans.observations import is_broken
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Host

logger = logging.getLogger(__name__)

LEAST_BETWEEN_S = 2.0
"""Shortest time between two announcements of something new: links are measured one after the other."""


class OwnPresence:
    """Our own presence: renewed as costs and links change, signed, and published."""

    def __init__(
        self,
        key: NodeKey,
        topic: str,
        terms: dict[str, str],
        announcement: Callable[[], CostAnnouncement],
        wall_s: Callable[[], float],
    ) -> None:
        self._key = key
        self._topic = topic
        self._terms = terms
        self._announcement = announcement
        self._wall_s = wall_s
        self.session = secrets.randbits(48)
        self.sequence = 0
        self.sealed = b""
        self.announced: CostAnnouncement
        """The costs, links and observations that were last announced, once `renew` was called."""

    def renew(self) -> None:
        """Seal a presence of the current costs. Raises Rejected if no member would accept it, as with costs
        that are too old."""
        announced = self._announcement()
        presence = Presence(
            session=self.session, sequence=self.sequence + 1, terms=self._terms, costs=announced
        )
        sealed = seal_presence(self._key, presence, topic=self._topic)
        open_presence(sealed, topic=self._topic, now_s=self._wall_s())
        self.sequence, self.sealed, self.announced = presence.sequence, sealed, announced

    def try_renew(self) -> None:
        """Call `renew`. If it is refused, keep the last presence until others find it stale."""
        try:
            self.renew()
        except Rejected as error:
            logger.warning("our costs are not announced, the last ones remain in use: %s", error)

    def _has_news(self) -> bool:
        now, told = self._announcement(), self.announced
        return now.links.keys() != told.links.keys() or _broken(now) != _broken(told)

    async def publish(
        self, host: Host, every_s: float, look_s: float, living: Callable[[], Iterable[str]]
    ) -> None:
        """Announce ourselves until cancelled, with ever longer pauses up to `every_s`.

        The pauses start short again while no member is `living`, when links or complaints are new, and when
        we have met a member. Gossip is lost while connections are young: two members that missed each other
        and then both met a third one are no longer alone, so meeting it must make them announce themselves
        again.
        """
        met, wait_s, published_at_s = set[str](), LEAST_BETWEEN_S, -inf
        while True:
            now_s, present = asyncio.get_running_loop().time(), {*living()}
            if not present or not present <= met or self._has_news():
                wait_s = LEAST_BETWEEN_S
            if now_s - published_at_s >= wait_s:
                self.try_renew()
                try:
                    await host.publish(self._topic, self.sealed)
                except NetworkError as error:
                    logger.debug("not announced: %s", error)
                met, wait_s, published_at_s = present, min(2 * wait_s, every_s), now_s
            met &= present
            await asyncio.sleep(look_s)


def _broken(said: CostAnnouncement) -> frozenset[str]:
    return frozenset(peer for peer, observation in said.observed.items() if is_broken(observation))

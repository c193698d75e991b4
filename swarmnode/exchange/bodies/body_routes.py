"""Ways to bodies: from an author directly, or through a peer that we are connected to.

ConnectionGate -> [BodyRoutes.connected];   BodyTransfer.fetch -> [.is_direct, .holders] -> whom to ask

Most of those who run this at home cannot be dialled. Which way works is learned from what was tried, and
tried again after some minutes: routers are restarted, and machines are carried about.
"""

import random
from collections.abc import Iterable

from swarmnode.bounded_dict import BoundedDict

DIAL_AGAIN_S = 300.0
"""An author that could not be dialled is dialled again after this time; others are asked meanwhile."""

MAX_AUTHORS = 4096
"""Authors whose way is remembered; those asked for least recently are forgotten first."""


class BodyRoutes:
    """Whom to ask for the bodies of an author."""

    def __init__(self) -> None:
        self.connected: frozenset[str] = frozenset()
        """Peers that we hold a connection to."""
        self._dial_at = BoundedDict[str, float](MAX_AUTHORS)
        self._through = BoundedDict[str, str](MAX_AUTHORS)
        self._worth: dict[str, float] = {}
        """Share of the times that a peer was the one to give us what we asked several for, the last ones
        counting most: from 0 to 1. What nobody had says nothing of those we asked: made-up names would make
        all look bad."""

    def is_direct(self, author: str, now: float) -> bool:
        """Return True if the author itself should be asked: connected, or never dialled in vain lately."""
        # A longer wait than any was noted before our clock was set back.
        waits = now < self._dial_at.get(author, now) <= now + DIAL_AGAIN_S
        return author in self.connected or not waits

    def reaches(self, author: str, now: float) -> bool | None:
        """Return True if we are connected to the author, False if it was dialled in vain lately, None if
        neither."""
        return True if author in self.connected else None if self.is_direct(author, now) else False

    def note_undialable(self, author: str, now: float) -> None:
        """Note that the author could not be dialled."""
        self._dial_at[author] = now + DIAL_AGAIN_S

    def leads_to(self, author: str) -> bool:
        """Return True if the author is connected to us, or to the peer that gave us its last body."""
        return author in self.connected or self._through.get(author) in self.connected

    def holders(self, author: str, rng: random.Random) -> list[str]:
        """Return the connected peers but for the author: first the one that gave us its last body, then those
        that most often had what we asked for, equals by lot."""
        others = sorted(self.connected - {author})
        rng.shuffle(others)
        through = self._through.get(author)
        return sorted(others, key=lambda peer: (peer != through, -self._worth.get(peer, 0.5)))

    def led_to(self, author: str, peer: str, *, rather_than: Iterable[str] = ()) -> None:
        """Take note that a peer gave us a body of an author, and who was asked before it and did not."""
        for one, gave in (*((other, 0.0) for other in rather_than), (peer, 1.0)):
            self._worth[one] = 0.8 * self._worth.get(one, 0.5) + 0.2 * gave
        if len(self._worth) > MAX_AUTHORS:
            self._worth = {one: worth for one, worth in self._worth.items() if one in self.connected}
        self._through[author] = peer

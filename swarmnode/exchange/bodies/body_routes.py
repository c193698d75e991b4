"""Routes to bodies: from an author directly, or through a peer that we are connected to.

Host.peers -> [BodyRoutes.connected];   BodyTransfer.fetch -> [.may_dial, .holders] -> whom to ask

Most homes cannot be dialled. The working route is learned from what was tried, and tried again after some
minutes: routers are restarted, and machines are carried about.
"""

import random
from collections.abc import Iterable

from swarmnode.bounded_dict import BoundedDict

DIAL_AGAIN_S = 300.0
"""Seconds before an author that could not be dialled is dialled again; others are asked meanwhile."""

MAX_AUTHORS = 4096
"""Most authors whose route is remembered; those noted least recently are forgotten first."""


class BodyRoutes:
    """Decides which peers to ask for the bodies of an author."""

    def __init__(self) -> None:
        self.connected: frozenset[str] = frozenset()
        """Peers that we hold a connection to."""
        self._dial_again_at = BoundedDict[str, float](MAX_AUTHORS)
        self._through = BoundedDict[str, str](MAX_AUTHORS)
        self._hit_rate: dict[str, float] = {}
        """Share of requests, from 0 to 1, in which a peer was the one to give us a body that we asked several
        for; recent ones count most. Bodies that nobody had do not count: made-up names would make every peer
        look bad."""

    def may_dial(self, author: str, now: float) -> bool:
        """Returns True if the author itself should be asked: it is connected, or was not dialled in vain
        lately."""
        # A wait longer than DIAL_AGAIN_S was noted before our clock was set back.
        waits = now < self._dial_again_at.get(author, now) <= now + DIAL_AGAIN_S
        return author in self.connected or not waits

    def reaches(self, author: str, now: float) -> bool | None:
        """Returns True if we are connected to the author, False if it was dialled in vain lately, and None
        otherwise."""
        return True if author in self.connected else None if self.may_dial(author, now) else False

    def note_undialable(self, author: str, now: float) -> None:
        """Notes that the author could not be dialled."""
        self._dial_again_at[author] = now + DIAL_AGAIN_S

    def has_route(self, author: str) -> bool:
        """Returns True if we are connected to the author, or to the peer that gave us its last body."""
        return author in self.connected or self._through.get(author) in self.connected

    def holders(self, author: str, rng: random.Random) -> list[str]:
        """Returns the connected peers without the author: first the one that gave us its last body, then
        those that most often had what we asked for; ties are broken at random."""
        others = sorted(self.connected - {author})
        rng.shuffle(others)
        through = self._through.get(author)
        return sorted(others, key=lambda peer: (peer != through, -self._hit_rate.get(peer, 0.5)))

    def note_route(self, author: str, peer: str, *, rather_than: Iterable[str] = ()) -> None:
        """Notes that a peer gave us a body of an author, and that the peers in `rather_than` were asked
        before it and did not."""
        for one, gave in (*((other, 0.0) for other in rather_than), (peer, 1.0)):
            self._hit_rate[one] = 0.8 * self._hit_rate.get(one, 0.5) + 0.2 * gave
        if len(self._hit_rate) > MAX_AUTHORS:
            self._hit_rate = {one: rate for one, rate in self._hit_rate.items() if one in self.connected}
        self._through[author] = peer

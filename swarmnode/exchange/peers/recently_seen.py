"""Messages and groups seen lately, remembered for as long as they could come again, within a bound.

Inbox, Fetcher -> [RecentlySeen] -> pool, buffer
"""

import hashlib
from collections.abc import Iterable

from swarmnode.bounded_dict import BoundedDict

KEY_BYTES = 16
"""Bytes kept of a digest: nobody finds a collision with one of the few thousand that are remembered."""


def key_of(*parts: bytes) -> bytes:
    """Returns a short key for data of any length. If the parts have fixed lengths, only the same parts give
    it.

    >>> len(key_of(b"author", b"hash"))
    16
    """
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()


class RecentlySeen(BoundedDict[bytes, float]):
    """Keys with the time when each was first seen, oldest first. Each is forgotten after `ttl_s`, and the
    oldest ones when there are more than `max_keys`.

    >>> seen = RecentlySeen(max_keys=2, ttl_s=60.0)
    >>> seen.add(b"one", now=0.0), seen.add(b"one", now=1.0), seen.add(b"one", now=61.0)
    (True, False, True)
    """

    def __init__(self, *, max_keys: int, ttl_s: float) -> None:
        super().__init__(max_keys)
        self._ttl_s = ttl_s

    def restore(self, items: Iterable[tuple[bytes, float]]) -> None:
        """Restores keys from before a restart, as older than all that were added since."""
        since = list(self.items())
        self.clear()
        self.update([*sorted(items, key=lambda item: item[1]), *since])

    def add(self, key: bytes, now: float) -> bool:
        """Remembers a key. Returns False if it was known already."""
        self.forget(now)
        if key in self:
            return False
        self[key] = now
        return True

    def renew(self, key: bytes, now: float) -> None:
        """Remembers a key as seen now, known or not."""
        self.forget(now)
        self[key] = now

    def forget(self, now: float) -> None:
        """Forgets keys that were seen too long ago."""
        while self:
            key, seen_at = next(iter(self.items()))
            if now - seen_at < self._ttl_s:
                return
            del self[key]

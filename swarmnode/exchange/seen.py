"""Remembers what has passed by, for as long as it could come again, within a bound.

Inbox, Fetcher -> [RecentlySeen] -> pool, buffer
"""

from collections import OrderedDict


class RecentlySeen:
    """A set of keys that forgets each after `ttl_s`, and the oldest when there are more than `max_keys`.

    >>> seen = RecentlySeen(max_keys=2, ttl_s=60.0)
    >>> seen.add(b"one", now=0.0), seen.add(b"one", now=1.0), seen.add(b"one", now=61.0)
    (True, False, True)
    """

    def __init__(self, *, max_keys: int, ttl_s: float) -> None:
        self._max_keys = max_keys
        self._ttl_s = ttl_s
        self._seen_at: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen_at)

    def add(self, key: bytes, now: float) -> bool:
        """Remember a key; False when it was known already."""
        self._forget(now)
        if key in self._seen_at:
            return False
        self._seen_at[key] = now
        if len(self._seen_at) > self._max_keys:
            self._seen_at.popitem(last=False)
        return True

    def _forget(self, now: float) -> None:
        while self._seen_at:
            key, seen_at = next(iter(self._seen_at.items()))
            if now - seen_at < self._ttl_s:
                return
            del self._seen_at[key]

"""Checked headers that wait to be selected. Most never are, and their bodies are never fetched.

Inbox -> [HeaderPool] -> choose -> Fetcher

The pool is bounded per author and in total, so its size does not grow with the swarm. When it is full, the
author with the most headers in it loses its oldest: newcomers and quiet nodes always find room.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from swarmnode.exchange.limits import MAX_POOL_HEADERS, MAX_POOL_HEADERS_PER_AUTHOR
from swarmnode.exchange.messages import Announcement


class HeaderPool:
    """Announcements by author, oldest first."""

    def __init__(
        self, *, max_headers: int = MAX_POOL_HEADERS, max_per_author: int = MAX_POOL_HEADERS_PER_AUTHOR
    ) -> None:
        self._max_headers = max_headers
        self._max_per_author = max_per_author
        self._by_author: dict[str, deque[Announcement]] = {}
        self._size = 0
        self.changed = asyncio.Event()
        """Set when a header was added, and by the fetcher when its demand changed."""

    def __len__(self) -> int:
        return self._size

    @property
    def waiting(self) -> Mapping[str, Sequence[Announcement]]:
        return self._by_author

    def add(self, announcement: Announcement) -> int:
        """Adds a header. Returns how many older ones had to leave for it (0 or 1)."""
        headers = self._by_author.setdefault(announcement.author, deque())
        headers.append(announcement)
        self._size += 1
        self.changed.set()
        if len(headers) > self._max_per_author:
            self._remove_oldest(announcement.author)
        elif self._size > self._max_headers:
            self._remove_oldest(max(self._by_author.values(), key=len)[0].author)
        else:
            return 0
        return 1

    def remove(self, announcement: Announcement) -> None:
        """Removes a header that is in the pool."""
        self._by_author[announcement.author].remove(announcement)
        self._shrink(announcement.author)

    def keep_only(self, is_wanted: Callable[[Announcement], bool]) -> int:
        """Drops the headers that are no longer wanted. Returns how many."""
        before = self._size
        for author in tuple(self._by_author):
            kept = deque(announcement for announcement in self._by_author[author] if is_wanted(announcement))
            self._size -= len(self._by_author[author]) - len(kept)
            self._by_author[author] = kept
            if not kept:
                del self._by_author[author]
        return before - self._size

    def _remove_oldest(self, author: str) -> None:
        self._by_author[author].popleft()
        self._shrink(author)

    def _shrink(self, author: str) -> None:
        self._size -= 1
        if not self._by_author[author]:
            del self._by_author[author]

"""Bodies that others may ask for, in bounded memory.

publish, fetch -> [BodyStore] -> BodyTransfer.answer
"""

from collections import OrderedDict


class BodyStore:
    """Compressed bodies by SHA-256, bounded in bytes and number. The oldest leave first, because old headers
    are no longer selected."""

    def __init__(self, *, max_bytes: int, max_bodies: int) -> None:
        self._max_bytes = max_bytes
        self._max_bodies = max_bodies
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._bodies)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def put(self, body_hash: bytes, body: bytes) -> None:
        """Adds a body; the oldest ones leave until all fit."""
        if body_hash not in self._bodies:
            self._bodies[body_hash] = body
            self._size_bytes += len(body)
        while self._size_bytes > self._max_bytes or len(self._bodies) > self._max_bodies:
            _, oldest = self._bodies.popitem(last=False)
            self._size_bytes -= len(oldest)

    def get(self, body_hash: bytes) -> bytes | None:
        return self._bodies.get(body_hash)

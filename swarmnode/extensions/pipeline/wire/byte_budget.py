"""A bound on the memory that other members may take of this machine at once, shared out fairly.

incoming_streams.py (a payload of known size) -> [ByteBudget.held] -> its bytes are read -> given back
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.refusals import Refusal


class ByteBudget:
    """Memory granted as soon as it is there. A peer at its own limit does not hold up the others, and
    all wait within the deadlines of their messages."""

    def __init__(self, total_bytes: int, per_peer_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._per_peer_bytes = min(per_peer_bytes, total_bytes)
        self._used: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        return self._used.total()

    @asynccontextmanager
    async def held(self, peer_id: str, size_bytes: int) -> AsyncGenerator[None, None]:
        """Wait for this amount of memory, and release it at the end. Raises Rejected: too_large."""
        if size_bytes > self._per_peer_bytes:
            raise Rejected(Refusal.TOO_LARGE, f"{size_bytes} bytes, at most {self._per_peer_bytes}")
        while (
            self._used[peer_id] + size_bytes > self._per_peer_bytes
            or self._used.total() + size_bytes > self._total_bytes
        ):
            await self._changed.wait()
        self._used[peer_id] += size_bytes
        try:
            yield
        finally:
            self._used[peer_id] -= size_bytes
            self._used += Counter()  # forgets the peers at zero
            self._changed.set()
            self._changed = asyncio.Event()

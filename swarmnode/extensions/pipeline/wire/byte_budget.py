"""Limits the memory that other members may use on this machine at once, and shares it fairly.

incoming_streams.py (a payload of known size) -> [ByteBudget.held] -> its bytes are read -> given back
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.refusals import Refusal


@dataclass(slots=True, eq=False)
class _Waiter:
    peer_id: str
    size_bytes: int
    granted: asyncio.Future[None]


class ByteBudget:
    """Memory, granted in the order of requests. A peer at its own limit does not hold up the others."""

    def __init__(self, total_bytes: int, per_peer_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._per_peer_bytes = min(per_peer_bytes, total_bytes)
        self._used: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []

    @asynccontextmanager
    async def held(self, peer_id: str, size_bytes: int) -> AsyncGenerator[None, None]:
        """Wait for this amount of memory, and release it at the end. Raises Rejected: too_large."""
        if size_bytes > self._per_peer_bytes:
            raise Rejected(Refusal.TOO_LARGE, f"{size_bytes} bytes, at most {self._per_peer_bytes}")
        waiter = _Waiter(peer_id, size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            self._grant()
            await waiter.granted
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self._used[peer_id] -= size_bytes
                self._used += Counter()  # forgets the peers at zero
            self._grant()

    def _grant(self) -> None:
        for waiter in tuple(self._waiting):
            if waiter.granted.done():
                continue  # It was cancelled in this pass of the event loop and has not left the queue yet.
            if self._used[waiter.peer_id] + waiter.size_bytes > self._per_peer_bytes:
                continue
            if self._used.total() + waiter.size_bytes > self._total_bytes:
                return  # The next ones may be smaller, but letting them pass would starve this one.
            self._waiting.remove(waiter)
            self._used[waiter.peer_id] += waiter.size_bytes
            waiter.granted.set_result(None)

"""Byte streams within one process, for MemoryNetwork.

MemoryHost.open_stream -> [memory_streams] -> both ends
"""

import asyncio
from collections import deque
from collections.abc import Callable

from swarmnode.errors import PeerUnreachable
from swarmnode.network.streams import PIECE_BYTES, Buffer

MEMORY_WINDOW_BYTES = 256 * 1024
"""Unread bytes that a stream within one process holds before its writer waits: yamux's first window."""

_LOOK_AGAIN_S = 0.005
_LOOK_AT_LEAST_S = 1.0
"""Seconds between two checks by a waiting stream whether the wires were cut: at first, and at most after
doubling each time."""


class MemoryPipe:
    """One direction of a stream within one process: a bounded number of bytes, in order."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def full(self) -> bool:
        return self._held_bytes >= MEMORY_WINDOW_BYTES

    def put(self, data: bytes, arrives_s: float) -> None:
        """Adds a piece. `arrives_s`: the time from which it may be read, by the event loop's clock."""
        if data:
            self._pieces.append((arrives_s, data))
            self._held_bytes += len(data)
            self._changed.set()

    def take(self, at_most_bytes: int, now_s: float) -> bytes:
        """Returns up to `at_most_bytes` bytes that have arrived by now; empty if none have."""
        if not self._pieces or self._pieces[0][0] > now_s:
            return b""
        arrived_s, piece = self._pieces.popleft()
        if len(piece) > at_most_bytes:
            self._pieces.appendleft((arrived_s, piece[at_most_bytes:]))
        taken = piece[:at_most_bytes]
        self._held_bytes -= len(taken)
        self._changed.set()
        return taken

    def close(self) -> None:
        self._closed = True
        self._pieces.clear()
        self._changed.set()

    async def change(self, within_s: float = _LOOK_AGAIN_S) -> bool:
        """Waits for a change, at most `within_s` seconds, or less if a piece is on its way. Returns True if
        there was a change."""
        self._changed.clear()
        if self._pieces:
            within_s = min(within_s, _LOOK_AGAIN_S)
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


class MemoryStream:
    """One end of a stream within one process. Made in pairs by `memory_streams`."""

    def __init__(
        self,
        peer_id: str,
        incoming: MemoryPipe,
        outgoing: MemoryPipe,
        state: Callable[[], str],
        delay_s: Callable[[], float],
    ) -> None:
        self._peer_id = peer_id
        self._incoming = incoming
        self._outgoing = outgoing
        self._state = state
        self._delay_s = delay_s
        self._last_arrives_s = 0.0

    @property
    def peer_id(self) -> str:
        return self._peer_id

    async def send(self, data: Buffer) -> None:
        content = memoryview(data).cast("B")
        for start in range(0, len(content), PIECE_BYTES):
            while self._outgoing.full or self._state() != "up":
                self._check()
                await self._outgoing.change()
            self._check()
            now_s = asyncio.get_running_loop().time()
            self._last_arrives_s = max(self._last_arrives_s, now_s + self._delay_s())
            self._outgoing.put(bytes(content[start : start + PIECE_BYTES]), self._last_arrives_s)

    async def receive(self, size_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < size_bytes:
            received += await self._next(size_bytes - len(received))
        return bytes(received)

    async def discard(self) -> None:
        try:
            while await self._next(PIECE_BYTES):
                pass
        except PeerUnreachable:
            pass

    def close(self) -> None:
        self._incoming.close()
        self._outgoing.close()

    async def _next(self, at_most_bytes: int) -> bytes:
        pause_s = _LOOK_AGAIN_S
        while True:
            self._check()
            if self._state() == "up":
                now_s = asyncio.get_running_loop().time()
                if piece := self._incoming.take(at_most_bytes, now_s):
                    return piece
            changed = await self._incoming.change(pause_s)
            pause_s = _LOOK_AGAIN_S if changed else min(2 * pause_s, _LOOK_AT_LEAST_S)

    def _check(self) -> None:
        if self._state() == "lost":
            self.close()
        if self._incoming.closed or self._outgoing.closed:
            raise PeerUnreachable("the peer closed the stream")


def memory_streams(
    one: str, other: str, state: Callable[[], str], delay_s: Callable[[], float]
) -> tuple[MemoryStream, MemoryStream]:
    """Returns both ends of a new stream: first that of peer `one`, then that of `other`. `state` is "up",
    "cut" (nothing moves until the wires are mended) or "lost"; `delay_s` is drawn per piece."""
    there, back = MemoryPipe(), MemoryPipe()
    return (
        MemoryStream(other, back, there, state, delay_s),
        MemoryStream(one, there, back, state, delay_s),
    )

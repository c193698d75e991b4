"""Byte streams between two peers, for data too large or too frequent for one request and one response."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from swarmnode.errors import PeerUnreachable
from swarmnode.network.host import Host

logger = logging.getLogger(__name__)

MEMORY_WINDOW_BYTES = 256 * 1024
"""Unread bytes that a stream within one process holds before its writer waits: yamux's first window."""

_LOOK_AGAIN_S = 0.005
_LOOK_AT_LEAST_S = 1.0
"""Seconds between two looks of a waiting stream within one process at whether the wires were cut: ever more,
up to these."""

_DISCARD_BYTES = 64 * 1024

Buffer = bytes | bytearray | memoryview


class ByteStream(Protocol):
    """One stream. One task may send while another receives; its owner closes it."""

    @property
    def peer_id(self) -> str:
        """Peer id of the far end."""
        ...

    async def send(self, data: Buffer) -> None:
        """Sends bytes. Waits while the far end does not read. Raises PeerUnreachable."""
        ...

    async def receive(self, size_bytes: int) -> bytes:
        """Returns exactly so many bytes. Raises PeerUnreachable if the stream ends before them."""
        ...

    async def discard(self) -> None:
        """Reads and discards until the far end closes."""
        ...

    def close(self) -> None:
        """Ends both directions at once. Bytes sent and not yet read may be lost."""
        ...


StreamHandler = Callable[[ByteStream], Awaitable[None]]
"""Called with each incoming stream, which is closed when it returns."""


class StreamHost(Host, Protocol):
    """A host that also has streams. Served protocols survive a restart of its daemon; open streams do not."""

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Hands incoming streams of `protocol` to `handler`. Serving it again replaces the handler."""
        ...

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> ByteStream:
        """Returns a stream to a peer, dialled if need be. Raises PeerUnreachable, RequestTimeout,
        HostDown."""
        ...


class Transport(Protocol):
    """Makes a node's host, not yet started: what `network.transport` names."""

    def __call__(
        self,
        identity_path: Path,
        *,
        listen: Sequence[str],
        announce: Sequence[str],
        map_port: bool,
        relays: Sequence[str] | None,
        relay_for_others: bool,
    ) -> StreamHost:
        """Called as P2pdHost is. `identity_path`: the node's private key; the host has its peer id."""
        ...


async def handle_stream(stream: ByteStream, protocol: str, handler: StreamHandler) -> None:
    """Runs a handler to its end and closes its stream. At the peer boundary no stream may take the node
    down."""
    try:
        await handler(stream)
    except PeerUnreachable as error:
        logger.debug("lost a stream of %s from %s: %s", protocol, stream.peer_id, error)
    except Exception:
        logger.exception("the handler of %s failed on a stream of %s", protocol, stream.peer_id)
    finally:
        stream.close()


class SocketStream:
    """A stream that the go-libp2p daemon hands us as a connection on its Unix socket."""

    def __init__(
        self,
        peer_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        received: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        """`received` is called with the number of bytes that came in."""
        self._received = received
        self._peer_id = peer_id
        self._reader = reader
        self._writer = writer

    @property
    def peer_id(self) -> str:
        return self._peer_id

    async def send(self, data: Buffer) -> None:
        try:
            self._writer.write(memoryview(data))
            await self._writer.drain()
        except OSError as error:
            raise PeerUnreachable("the peer closed the stream") from error

    async def receive(self, size_bytes: int) -> bytes:
        try:
            data = await self._reader.readexactly(size_bytes)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PeerUnreachable("the peer closed the stream") from error
        self._received(size_bytes)
        return data

    async def discard(self) -> None:
        try:
            while data := await self._reader.read(_DISCARD_BYTES):
                self._received(len(data))
        except OSError as error:
            logger.debug("a stream of %s ended with a reset: %s", self._peer_id, error)

    def close(self) -> None:
        # Not close(): that would wait for a frozen daemon to take what we wrote.
        self._writer.transport.abort()


class MemoryPipe:
    """One direction of a stream within one process: bytes in order, a bounded number of them."""

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
        """`arrives_s`: the time at which it may be read, by the clock of the event loop."""
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
        """Returns after a change, or without one after so many seconds, sooner if a piece is on its way.
        True if there was a change."""
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
        for start in range(0, len(content), _DISCARD_BYTES):
            while self._outgoing.full or self._state() != "up":
                self._check()
                await self._outgoing.change()
            self._check()
            now_s = asyncio.get_running_loop().time()
            self._last_arrives_s = max(self._last_arrives_s, now_s + self._delay_s())
            self._outgoing.put(bytes(content[start : start + _DISCARD_BYTES]), self._last_arrives_s)

    async def receive(self, size_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < size_bytes:
            received += await self._next(size_bytes - len(received))
        return bytes(received)

    async def discard(self) -> None:
        try:
            while await self._next(_DISCARD_BYTES):
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

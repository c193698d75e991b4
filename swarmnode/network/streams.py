"""Byte streams between two peers, for data too large or too frequent for one request and one response."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from swarmnode.errors import PeerUnreachable
from swarmnode.network.host import Host
from swarmnode.registry import find_called

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 * 1024
"""Bytes sent or read at once."""

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
        """Returns exactly this many bytes. Raises PeerUnreachable if the stream ends before them."""
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
    """Makes a node's host without starting it: the type of the callable that `network.transport` names."""

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
        """Called with the arguments of P2pdHost. `identity_path`: the node's private key; the host has its
        peer id."""
        ...


def transport_of(name: str) -> Transport:
    """Imports the callable that `network.transport` names. Raises ConfigError if it cannot be called as
    `Transport`."""
    return find_called("transport", name, Transport.__call__)


async def handle_stream(stream: ByteStream, protocol: str, handler: StreamHandler) -> None:
    """Runs a handler to its end and closes its stream. At the peer boundary, no stream may take the node
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
            while data := await self._reader.read(PIECE_BYTES):
                self._received(len(data))
        except OSError as error:
            logger.debug("a stream of %s ended with a reset: %s", self._peer_id, error)

    def close(self) -> None:
        # Not close(): that would wait for a frozen daemon to read what we wrote.
        self._writer.transport.abort()

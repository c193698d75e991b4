"""The daemon's control socket: each question gets its own connection, bounds and a deadline.

p2pd_host.py -> [ControlClient] -> Unix socket (varint-framed protobuf) -> p2pd
hivemind wheel -> [load_messages] -> ControlClient
               -> [find_daemon] -> daemon_process.py

A daemon that cannot be asked is HostDown. One that answers "no" is DaemonRefused, which callers translate,
because the meaning depends on the question. Much of its output it only passes on from peers: the parts that
make no sense are skipped and counted, and never say anything about the daemon.

Of the hivemind wheel we use the go-libp2p daemon and its protobuf messages. hivemind itself is not imported,
because it would import torch; `find_spec` only looks up where the package lies.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from swarmnode.errors import HostDown, MessageTooLarge, NetworkError, RequestTimeout
from swarmnode.network.daemon.hivemind_wheel import load_messages
from swarmnode.network.framing import encode_frame, encode_uvarint, read_frame
from swarmnode.network.multiaddr import (
    address_to_bytes,
    peer_id_from_bytes,
    peer_id_to_bytes,
    readable_addresses,
)
from swarmnode.network.skip_counters import SkipCause, SkipCounters
from swarmnode.printable import printable

LOCAL_TIMEOUT_S = 5.0
"""Deadline of questions that the daemon answers by itself, in under a millisecond on a quiet machine."""

MAX_REPLY_BYTES = 4 * 1024 * 1024
"""Longest reply of the daemon in bytes. GossipSub caps its messages at 1 MiB, and a list of 256 peers stays
below 100 KiB."""

SPARE_RECORDS = 256
"""Provider records asked for beyond the wanted number: a peer may send many unusable ones."""

MAX_REFUSAL_CHARS = 400

CODE_UNIX = 400
"""Multiaddr protocol code of a Unix socket path."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class DaemonRefused(NetworkError):
    """Raised if the daemon answered with an error."""


class Unusable(NetworkError):
    """Raised for data of a peer, passed on by the daemon, that cannot be used. The daemon itself is fine."""


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """A peer and the addresses, without /p2p/, at which the daemon knows it."""

    peer_id: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GossipFrame:
    """A message as the daemon hands it out, its libp2p signature already checked."""

    sender: str
    data: bytes


class ControlClient:
    """Asks one daemon. Holds no connection between calls."""

    def __init__(self, socket_path: Path, skipped: SkipCounters | None = None) -> None:
        """`skipped` counts the unusable parts of answers."""
        self._socket_path = socket_path
        self._skipped = skipped or SkipCounters()
        self._pb = load_messages()

    async def identify(self, *, timeout_s: float = LOCAL_TIMEOUT_S) -> PeerAddresses:
        """Returns the daemon's own peer id and its dialable addresses."""
        reply = await self._ask_local(self._request("IDENTIFY"), timeout_s)
        try:
            peer_id = peer_id_from_bytes(reply.identify.id)
        except NetworkError as error:
            raise HostDown("the network process did not report its identity") from error
        return PeerAddresses(peer_id, readable_addresses(reply.identify.addrs))

    async def connected_peers(self) -> tuple[PeerAddresses, ...]:
        """Returns one entry per connection, with the address at its far end."""
        reply = await self._ask_local(self._request("LIST_PEERS"))
        return tuple(self._usable(reply.peers, SkipCause.CONNECTION))

    async def connect(self, peer: PeerAddresses, timeout_s: float) -> None:
        """Dials a peer unless it is connected. Raises DaemonRefused, RequestTimeout."""
        request = self._pb.ConnectRequest(
            peer=peer_id_to_bytes(peer.peer_id),
            addrs=[address_to_bytes(address) for address in peer.addresses],
            timeout=_daemon_timeout_s(timeout_s),
        )
        await self._ask_remote(self._request("CONNECT", connect=request), timeout_s)

    async def disconnect(self, peer_id: str) -> None:
        """Closes every connection to a peer."""
        request = self._pb.DisconnectRequest(peer=peer_id_to_bytes(peer_id))
        await self._ask_local(self._request("DISCONNECT", disconnect=request))

    async def publish(self, topic: str, data: bytes) -> None:
        await self._ask_local(self._pubsub("PUBLISH", topic=topic, data=data))

    async def subscribe(self, topic: str) -> Stream:
        """Opens a subscription to be read with `read_gossip`. Closing it ends the subscription."""
        return await self._open(self._pubsub("SUBSCRIBE", topic=topic), LOCAL_TIMEOUT_S, HostDown)

    async def read_gossip(self, reader: asyncio.StreamReader) -> GossipFrame:
        """Returns the next message of a subscription. Raises HostDown if the daemon ended it, and Unusable
        for a message that nobody can have sent; the next one can still be read."""
        message = await self._receive(reader, self._pb.PSMessage())
        # `from` is a keyword of Python, hence no attribute syntax.
        return GossipFrame(_usable_id(getattr(message, "from")), message.data)

    async def handle_streams(self, protocol: str, listener: Path) -> None:
        """Has the daemon connect to our Unix socket for each incoming stream of `protocol`."""
        path = str(listener).encode()
        address = encode_uvarint(CODE_UNIX) + encode_frame(path)
        request = self._pb.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._ask_local(self._request("STREAM_HANDLER", streamHandler=request))

    async def read_stream_info(self, reader: asyncio.StreamReader) -> tuple[str, str]:
        """Returns (peer id, protocol), the first message on a connection that the daemon made to our socket.
        Raises HostDown if it does not come, Unusable for an impossible peer id."""
        info = await self._receive(reader, self._pb.StreamInfo())
        return _usable_id(info.peer), _text(info.proto)

    async def open_stream(self, peer_id: str, protocol: str, timeout_s: float) -> Stream:
        """Returns a stream to a peer, dialled if need be. Raises DaemonRefused, RequestTimeout."""
        request = self._pb.StreamOpenRequest(
            peer=peer_id_to_bytes(peer_id), proto=[protocol], timeout=_daemon_timeout_s(timeout_s)
        )
        return await self._open(self._request("STREAM_OPEN", streamOpen=request), timeout_s, RequestTimeout)

    async def find_peer(self, peer_id: str, timeout_s: float) -> PeerAddresses:
        """Returns every address of a peer: at once if we are connected to it, else by a Kademlia look-up.
        Raises DaemonRefused, RequestTimeout, and Unusable if there are too many to be read."""
        request = self._dht("FIND_PEER", timeout_s, peer=peer_id_to_bytes(peer_id))
        reply = await self._ask_remote(request, timeout_s, too_large=Unusable)
        return PeerAddresses(peer_id, readable_addresses(reply.dht.peer.addrs))

    async def provide(self, cid: bytes, timeout_s: float) -> None:
        """Puts a provider record of ours into the Kademlia table."""
        await self._ask_remote(self._dht("PROVIDE", timeout_s, cid=cid), timeout_s)

    async def find_providers(self, cid: bytes, limit: int, timeout_s: float) -> tuple[PeerAddresses, ...]:
        """Returns the providers found before the deadline, at most `limit`; malformed records are left
        out."""
        records = limit + SPARE_RECORDS
        request = self._dht("FIND_PROVIDERS", timeout_s, cid=cid, count=records)
        found: list[PeerAddresses] = []
        try:
            async with _deadline(timeout_s, RequestTimeout), self._connection() as stream:
                await self._ask(stream, request)
                for _ in range(records):
                    reply = await self._receive(stream[0], self._pb.DHTResponse(), too_large=Unusable)
                    if reply.type == self._pb.DHTResponse.END:
                        break
                    found += self._usable([reply.peer], SkipCause.PROVIDER_RECORD)
                    if len(found) == limit:
                        break
        except RequestTimeout:
            # A look-up may wait for peers that are gone; its findings so far are the answer.
            pass
        except Unusable as error:
            # The frames after it are lost as well.
            self._skipped.note(SkipCause.PROVIDER_RECORD, error.message)
        return tuple(found)

    def _request(self, kind: str, **fields: Any) -> Any:
        return self._pb.Request(type=self._pb.Request.Type.Value(kind), **fields)

    def _pubsub(self, kind: str, **fields: Any) -> Any:
        request = self._pb.PSRequest(type=self._pb.PSRequest.Type.Value(kind), **fields)
        return self._request("PUBSUB", pubsub=request)

    def _dht(self, kind: str, timeout_s: float, **fields: Any) -> Any:
        kind_value = self._pb.DHTRequest.Type.Value(kind)
        request = self._pb.DHTRequest(type=kind_value, timeout=_daemon_timeout_s(timeout_s), **fields)
        return self._request("DHT", dht=request)

    async def _ask_local(self, request: Any, timeout_s: float = LOCAL_TIMEOUT_S) -> Any:
        async with _deadline(timeout_s, HostDown), self._connection() as stream:
            return await self._ask(stream, request)

    async def _ask_remote(
        self, request: Any, timeout_s: float, *, too_large: type[NetworkError] = HostDown
    ) -> Any:
        async with _deadline(timeout_s, RequestTimeout), self._connection() as stream:
            return await self._ask(stream, request, too_large=too_large)

    async def _open(self, request: Any, timeout_s: float, late: type[NetworkError]) -> Stream:
        """Sends a request and returns the connection, which carries the stream from now on."""
        async with _deadline(timeout_s, late):
            stream = await self._dial()
            try:
                await self._ask(stream, request)
            except BaseException:
                stream[1].transport.abort()
                raise
            return stream

    async def _ask(self, stream: Stream, request: Any, *, too_large: type[NetworkError] = HostDown) -> Any:
        reader, writer = stream
        try:
            writer.write(encode_frame(request.SerializeToString()))
            await writer.drain()
        except OSError as error:
            raise HostDown("the network process closed the connection") from error
        reply = await self._receive(reader, self._pb.Response(), too_large=too_large)
        if reply.type == self._pb.Response.ERROR:
            said = " ".join(_text(reply.error.msg).split())
            raise DaemonRefused(printable(said, max_chars=MAX_REFUSAL_CHARS))
        return reply

    async def _receive(
        self, reader: asyncio.StreamReader, message: Any, *, too_large: type[NetworkError] = HostDown
    ) -> Any:
        """Returns the next message. `too_large`: raises Unusable for it if a peer decides its size."""
        try:
            message.ParseFromString(await read_frame(reader, MAX_REPLY_BYTES))
        except MessageTooLarge as error:
            raise too_large(f"the network process sent too large a message: {error.message}") from error
        except (OSError, asyncio.IncompleteReadError, DecodeError) as error:
            raise HostDown("the network process closed the connection") from error
        if not message.IsInitialized():
            raise HostDown("the network process sent a message without its required fields")
        return message

    def _usable(self, peers: Iterable[Any], cause: SkipCause) -> Iterator[PeerAddresses]:
        """Yields the peers of a list, without malformed ones."""
        for info in peers:
            try:
                yield PeerAddresses(_usable_id(info.id), readable_addresses(info.addrs))
            except Unusable as error:
                self._skipped.note(cause, error.message)

    async def _dial(self) -> Stream:
        try:
            return await asyncio.open_unix_connection(str(self._socket_path))
        except OSError as error:
            raise HostDown("the network process is not accepting connections") from error

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[Stream, None]:
        reader, writer = await self._dial()
        try:
            yield reader, writer
        finally:
            # Not close(): that would wait for a frozen daemon to read what we sent.
            writer.transport.abort()


@asynccontextmanager
async def _deadline(timeout_s: float, late: type[NetworkError]) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise late(f"no answer from the network process within {timeout_s:g} s") from error


def _daemon_timeout_s(timeout_s: float) -> int:
    # Whole seconds, and later than our own deadline, so that the daemon's only ends what we have given up on.
    return math.ceil(timeout_s) + 1


def _usable_id(multihash: bytes) -> str:
    try:
        return peer_id_from_bytes(multihash)
    except NetworkError as error:
        raise Unusable(error.message) from error


def _text(value: str | bytes) -> str:
    # protobuf hands out the bytes of a text that is not UTF-8.
    return value if isinstance(value, str) else value.decode(errors="replace")

"""The daemon's control socket: each question gets its own connection, bounds and a deadline.

p2pd.py -> [ControlClient] -> Unix socket (varint-framed protobuf) -> p2pd

A daemon that cannot be asked is HostDown; one that answers "no" is DaemonRefused, which callers translate,
because what went wrong depends on the question.
"""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from swarmnode.errors import HostDown, MessageTooLarge, NetworkError, RequestTimeout
from swarmnode.network.framing import encode_frame, encode_uvarint, read_frame
from swarmnode.network.multiaddr import (
    address_to_bytes,
    peer_id_from_bytes,
    peer_id_to_bytes,
    readable_addresses,
)
from swarmnode.network.p2pd_bundle import load_messages

LOCAL_TIMEOUT_S = 5.0
"""For questions that the daemon answers by itself, in under a millisecond on a quiet machine."""

MAX_REPLY_BYTES = 4 * 1024 * 1024
"""The daemon is ours; GossipSub caps its messages at 1 MiB, and a list of 256 peers stays below 100 KiB."""

CODE_UNIX = 400
"""Multiaddr protocol code of a Unix socket path."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class DaemonRefused(NetworkError):
    """The daemon answered with an error."""


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

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._pb = load_messages()

    async def identify(self, *, timeout_s: float = LOCAL_TIMEOUT_S) -> PeerAddresses:
        """Who the daemon is and where it can be dialled."""
        reply = await self._ask_local(self._request("IDENTIFY"), timeout_s)
        return _peer_addresses(reply.identify)

    async def connected_peers(self) -> tuple[PeerAddresses, ...]:
        """One entry per connection, with the address at its far end."""
        reply = await self._ask_local(self._request("LIST_PEERS"))
        return tuple(_peer_addresses(peer) for peer in reply.peers)

    async def connect(self, peer: PeerAddresses, timeout_s: float) -> None:
        """Dial a peer, unless already connected. Raises DaemonRefused, RequestTimeout."""
        request = self._pb.ConnectRequest(
            peer=peer_id_to_bytes(peer.peer_id),
            addrs=[address_to_bytes(address) for address in peer.addresses],
            timeout=_daemon_timeout_s(timeout_s),
        )
        await self._ask_remote(self._request("CONNECT", connect=request), timeout_s)

    async def disconnect(self, peer_id: str) -> None:
        """Close every connection to a peer."""
        request = self._pb.DisconnectRequest(peer=peer_id_to_bytes(peer_id))
        await self._ask_local(self._request("DISCONNECT", disconnect=request))

    async def publish(self, topic: str, data: bytes) -> None:
        await self._ask_local(self._pubsub("PUBLISH", topic=topic, data=data))

    async def subscribe(self, topic: str) -> Stream:
        """A stream to be read with `read_gossip`. Closing it ends the subscription."""
        return await self._open(self._pubsub("SUBSCRIBE", topic=topic), LOCAL_TIMEOUT_S, HostDown)

    async def read_gossip(self, reader: asyncio.StreamReader) -> GossipFrame:
        """The next message of a subscription. Raises HostDown when the daemon ended it."""
        message = await self._receive(reader, self._pb.PSMessage())
        # `from` is a keyword of Python, hence no attribute syntax.
        return GossipFrame(peer_id_from_bytes(getattr(message, "from")), message.data)

    async def handle_streams(self, protocol: str, listener: Path) -> None:
        """Have the daemon connect to our Unix socket for each incoming stream of `protocol`."""
        path = str(listener).encode()
        address = encode_uvarint(CODE_UNIX) + encode_frame(path)
        request = self._pb.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._ask_local(self._request("STREAM_HANDLER", streamHandler=request))

    async def read_stream_info(self, reader: asyncio.StreamReader) -> tuple[str, str]:
        """(peer id, protocol): the first thing on a connection that the daemon made to our socket."""
        info = await self._receive(reader, self._pb.StreamInfo())
        return peer_id_from_bytes(info.peer), info.proto

    async def open_stream(self, peer_id: str, protocol: str, timeout_s: float) -> Stream:
        """A stream to a peer, dialled if need be. Raises DaemonRefused, RequestTimeout."""
        request = self._pb.StreamOpenRequest(
            peer=peer_id_to_bytes(peer_id), proto=[protocol], timeout=_daemon_timeout_s(timeout_s)
        )
        return await self._open(self._request("STREAM_OPEN", streamOpen=request), timeout_s, RequestTimeout)

    async def find_peer(self, peer_id: str, timeout_s: float) -> PeerAddresses:
        """Every address of a peer; at once when we are connected to it, else by a Kademlia lookup."""
        request = self._dht("FIND_PEER", timeout_s, peer=peer_id_to_bytes(peer_id))
        return _peer_addresses((await self._ask_remote(request, timeout_s)).dht.peer)

    async def provide(self, cid: bytes, timeout_s: float) -> None:
        """Put a provider record of ours into the Kademlia table."""
        await self._ask_remote(self._dht("PROVIDE", timeout_s, cid=cid), timeout_s)

    async def find_providers(self, cid: bytes, limit: int, timeout_s: float) -> tuple[PeerAddresses, ...]:
        """Providers found before the deadline, at most `limit`."""
        request = self._dht("FIND_PROVIDERS", timeout_s, cid=cid, count=limit)
        found: list[PeerAddresses] = []
        try:
            async with _deadline(timeout_s, RequestTimeout), self._connection() as stream:
                await self._ask(stream, request)
                while len(found) < limit:
                    reply = await self._receive(stream[0], self._pb.DHTResponse())
                    if reply.type == self._pb.DHTResponse.END:
                        break
                    found.append(_peer_addresses(reply.peer))
        except RequestTimeout:
            # A lookup may wait for peers that are gone; what it found by now is the answer.
            pass
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

    async def _ask_remote(self, request: Any, timeout_s: float) -> Any:
        async with _deadline(timeout_s, RequestTimeout), self._connection() as stream:
            return await self._ask(stream, request)

    async def _open(self, request: Any, timeout_s: float, late: type[NetworkError]) -> Stream:
        """Ask, and hand the connection over: from now on it carries the stream."""
        async with _deadline(timeout_s, late):
            stream = await self._dial()
            try:
                await self._ask(stream, request)
            except BaseException:
                stream[1].transport.abort()
                raise
            return stream

    async def _ask(self, stream: Stream, request: Any) -> Any:
        reader, writer = stream
        try:
            writer.write(encode_frame(request.SerializeToString()))
            await writer.drain()
        except OSError as error:
            raise HostDown("the network process hung up") from error
        reply = await self._receive(reader, self._pb.Response())
        if reply.type == self._pb.Response.ERROR:
            raise DaemonRefused(" ".join(reply.error.msg.split()))
        return reply

    async def _receive(self, reader: asyncio.StreamReader, message: Any) -> Any:
        try:
            message.ParseFromString(await read_frame(reader, MAX_REPLY_BYTES))
        except (OSError, asyncio.IncompleteReadError, MessageTooLarge, DecodeError) as error:
            raise HostDown("the network process hung up") from error
        if not message.IsInitialized():
            raise HostDown("the network process sent a message without its required fields")
        return message

    async def _dial(self) -> Stream:
        try:
            return await asyncio.open_unix_connection(str(self._socket_path))
        except OSError as error:
            raise HostDown("the network process does not listen") from error

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
        raise late(f"no answer from the network within {timeout_s:g} s") from error


def _daemon_timeout_s(timeout_s: float) -> int:
    # Whole seconds, and later than our own deadline: it only ends what we have given up on.
    return math.ceil(timeout_s) + 1


def _peer_addresses(info: Any) -> PeerAddresses:
    return PeerAddresses(peer_id_from_bytes(info.id), readable_addresses(list(info.addrs)))

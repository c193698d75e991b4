"""Input from other peers to our daemon: the streams that are served, and the peers that may stay
connected."""

import asyncio
import logging
import socket
import struct
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from swarmnode.errors import NetworkError, PeerUnreachable
from swarmnode.network.daemon.p2pd_control import ControlClient, DaemonRefused, PeerAddresses, Unusable
from swarmnode.network.host import BarredPeers
from swarmnode.network.multiaddr import is_relayed, parse_address
from swarmnode.network.rpc import (
    READ_TIMEOUT_S,
    Service,
    SkipCause,
    SkipCounters,
    StreamSlot,
    StreamSlots,
    StreamStage,
    answer,
)
from swarmnode.network.streams import SocketStream, StreamHandler, handle_stream

logger = logging.getLogger(__name__)


# ---- who may stay connected ----

SIEGE_S = 10.0
"""Seconds after a barred peer was seen during which connections are checked more often."""

SIEGE_LOOK_EVERY_S = 0.04
SIEGE_LOOKS = 5
"""Most checks in a row before the size of the daemon is looked at again."""


class PeerGate:
    """Bars peers, and disconnects them whenever they come back."""

    def __init__(self, listen: Callable[[], Sequence[str]], *, relays: bool = False) -> None:
        """`listen`: the addresses that our daemon listens on. `relays`: the daemon passes on streams between
        others."""
        self.barred = BarredPeers()
        self.traffic = Traffic(relays=relays)
        self._listen = listen
        self._besieged_until_s = 0.0

    def check(self, peer_id: str) -> None:
        """Raises PeerUnreachable for a peer that is barred."""
        if peer_id in self.barred:
            raise PeerUnreachable(f"{peer_id} is barred: it broke the rules a while ago")

    def admits(self, peer_id: str) -> bool:
        """Returns True if streams of this peer are read at all."""
        if peer_id in self.barred:
            self._besiege()
            return False
        return True

    def bar(self, peer_id: str, for_s: float) -> None:
        if for_s > 0:
            self.barred.bar(peer_id, for_s)
            self._besiege()

    async def disconnect(self, control: ControlClient, peer_id: str) -> None:
        """Ends every connection to a peer. Raises HostDown."""
        try:
            await control.disconnect(peer_id)
        except DaemonRefused as error:
            logger.debug("%s could not be disconnected: %s", peer_id, error)

    async def look(self, control: ControlClient) -> set[str]:
        """Records the traffic, disconnects barred peers and flooders, and returns the other connected
        peers."""
        connections = await control.connected_peers()
        kept_bytes = self.traffic.kept_bytes(self._listen(), connections)
        await self._send_away(control, self.traffic.flooders(kept_bytes), kept_bytes)
        return await self._turn_away(control, connections)

    async def guard(self, control: ControlClient) -> None:
        """Checks connections continuously, not once a second, while barred peers come straight back: a
        flooder sends megabytes in a second."""
        for _ in range(SIEGE_LOOKS):
            if time.monotonic() >= self._besieged_until_s:
                return
            await self._turn_away(control, await control.connected_peers())
            await asyncio.sleep(SIEGE_LOOK_EVERY_S)

    async def relieve(self, control: ControlClient) -> None:
        """Called as the daemon grows: disconnects the largest senders, as far as they are known."""
        kept_bytes = self.traffic.kept_bytes(self._listen(), await control.connected_peers())
        await self._send_away(control, largest_senders(kept_bytes), kept_bytes)

    async def _send_away(
        self, control: ControlClient, peers: Sequence[str], kept_bytes: Mapping[str, int]
    ) -> None:
        for peer_id in peers:
            barred_s = self.traffic.bar_for_s(peer_id)
            logger.warning(
                "%s sent the network process %.1f MiB within seconds that are of no use to us;"
                " disconnected for %.0f s",
                peer_id, kept_bytes[peer_id] / 2**20, barred_s,
            )  # fmt: skip
            self.bar(peer_id, barred_s)
            await self.disconnect(control, peer_id)

    async def _turn_away(self, control: ControlClient, connections: Sequence[PeerAddresses]) -> set[str]:
        connected = {connection.peer_id for connection in connections}
        barred = self.barred.among(connected)
        for peer_id in barred:
            logger.debug("disconnecting %s again: it is barred", peer_id)
            self._besiege()
            await self.disconnect(control, peer_id)
        return connected - barred

    def _besiege(self) -> None:
        self._besieged_until_s = time.monotonic() + SIEGE_S


# ---- what is served ----


class StreamServer:
    """The served protocols, and the places for incoming streams. Outlives the daemon."""

    def __init__(self, gate: PeerGate, skipped: SkipCounters) -> None:
        self.services: dict[str, Service] = {}
        self.handlers: dict[str, StreamHandler] = {}
        self._gate = gate
        self._skipped = skipped
        # Apart: a stream may live for hours, and no number of them should keep a request out.
        self._request_slots = StreamSlots()
        self._stream_slots = StreamSlots()

    async def serve(
        self, control: ControlClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one stream to its end. The caller closes it."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                peer_id, protocol = await control.read_stream_info(reader)
            if not self._gate.admits(peer_id):
                logger.debug("refused a stream of %s from %s, which is barred", protocol, peer_id)
            elif handler := self.handlers.get(protocol):
                with _place(self._stream_slots, peer_id, writer) as slot:
                    self._gate.traffic.expects(peer_id, STREAMED_BYTES)
                    stream = SocketStream(peer_id, reader, writer, received=self._received(slot))
                    await handle_stream(stream, protocol, handler)
            elif service := self.services.get(protocol):
                with _place(self._request_slots, peer_id, writer) as slot:
                    self._gate.traffic.expects(peer_id, UNREAD_REQUESTS * service.max_request_bytes)
                    await answer(reader, writer, peer_id, self._counted(service), reach=slot.reach)
        except Unusable as error:
            self._skipped.note(SkipCause.STREAM, f"a stream of nobody, {error.message}")
        except (NetworkError, TimeoutError) as error:
            logger.debug("lost an incoming stream: %s", error)

    def _counted(self, service: Service) -> Service:
        async def handler(peer_id: str, request: bytes) -> bytes:
            self._gate.traffic.handed(peer_id, len(request))
            return await service.handler(peer_id, request)

        return replace(service, handler=handler)

    def _received(self, slot: StreamSlot) -> Callable[[int], None]:
        def received(size_bytes: int) -> None:
            slot.reach(StreamStage.WORKED_ON)
            self._gate.traffic.handed(slot.peer_id, size_bytes)

        return received


@contextmanager
def _place(
    slots: StreamSlots, peer_id: str, writer: asyncio.StreamWriter
) -> Generator[StreamSlot, None, None]:
    slot = slots.take(peer_id, writer.transport.abort)
    if slot is None:
        raise PeerUnreachable(f"no room for a stream of {peer_id}")
    try:
        yield slot
    finally:
        slots.give_back(slot)


# ---- bytes of each connection, as the kernel counts them ----

Connection = tuple[int, str, int]
"""A TCP connection: (local port, remote address, remote port)."""

_AF_NETLINK = 16
_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_ESTABLISHED = 1 << 1
_INFO = 2
_BYTES_RECEIVED_AT = 128
"""Offset of the received bytes in `struct tcp_info`, since Linux 4.1."""

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_MESSAGE_BYTES = 72
"""Size of `struct inet_diag_msg`."""

_TIMEOUT_S = 0.2
_MAX_READS = 256
"""Most reads of 64 KiB, several hundred connections each: an answer without end is no answer."""


def received_bytes(local_ports: frozenset[int]) -> dict[Connection, int] | None:
    """Returns the bytes received so far on every established connection to one of our ports."""
    if sys.platform != "linux" or not local_ports:
        return None
    try:
        return {
            connection: size_bytes
            for family in (socket.AF_INET, socket.AF_INET6)
            for connection, size_bytes in _connections(family)
            if connection[0] in local_ports
        }
    except (OSError, struct.error):
        return None


def _connections(family: int) -> Iterator[tuple[Connection, int]]:
    request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
    with socket.socket(_AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(header + request)
        for _ in range(_MAX_READS):
            for kind, body in _messages(kernel.recv(65536)):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel does not tell")
                found = _read(family, body)
                if found is not None:
                    yield found
    raise OSError("the kernel does not come to an end")


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        size_bytes, kind, *_ = _HEADER.unpack_from(data, at)
        yield kind, data[at + _HEADER.size : at + size_bytes]
        at += max(_HEADER.size, (size_bytes + 3) & ~3)


def _read(family: int, body: bytes) -> tuple[Connection, int] | None:
    local_port, remote_port = struct.unpack_from(">HH", body, 4)
    address = body[24 : 24 + (4 if family == socket.AF_INET else 16)]
    at = _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(body):
        size_bytes, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == _INFO and size_bytes >= _ATTRIBUTE.size + _BYTES_RECEIVED_AT + 8:
            (count,) = struct.unpack_from("=Q", body, at + _ATTRIBUTE.size + _BYTES_RECEIVED_AT)
            return (local_port, socket.inet_ntop(family, address), remote_port), count
        at += max(_ATTRIBUTE.size, (size_bytes + 3) & ~3)
    return None


# ---- who made the daemon grow ----

WINDOW_S = 5.0
MAX_SAMPLES = 8

LEAST_BLAME_BYTES = 256 * 1024
"""Fewest bytes within the window for which a peer is blamed. Eight honest neighbours' gossip stays below."""

FLOOD_BYTES = 2 * 2**20
"""Most bytes within the window, besides gossip, of an honest peer: two bodies that came too late to be read.
Seven thousand provider records have as many, and keep the daemon busy for a sixth of a second."""

STREAMED_BYTES = 64 * 2**20
"""Additional bytes that may wait in the daemon from a peer with open streams, such as a member of a
pipeline."""

RELAYED_BYTES = 1024 * 2**20
"""Additional bytes that a relay accepts from each peer: it cannot tell passing traffic from its own."""

UNREAD_REQUESTS = 2
"""Requests of a peer that may be on their way, or wait in the daemon, as its bytes are counted: a member's
bulk probe alone is larger than FLOOD_BYTES."""

GOSSIP_ENVELOPE_BYTES = 256
"""Bytes of author, topic, signature and frames around a message of gossip."""

GOSSIP_COPIES = 2
"""Copies of a gossip message per neighbour: it passes one on, and announces it in up to three heartbeats."""

SHARE_OF_LARGEST = 0.25
"""Share of the largest sender's bytes from which on another sender is blamed with it."""

FIRST_BAR_S = 60.0
LONGEST_BAR_S = 3600.0
"""Longest bar in seconds. An honest peer on a bad day is back after a minute; a repeated offence bars four
times longer."""

MAX_OFFENDERS = 1024


def largest_senders(kept_bytes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the peers to disconnect, largest sender first.

    >>> largest_senders({"a": 9_000_000, "b": 3_000_000, "c": 40_000})
    ('a', 'b')
    """
    ranked = sorted(kept_bytes, key=lambda peer: kept_bytes[peer], reverse=True)
    if not ranked:
        return ()
    least = max(LEAST_BLAME_BYTES, SHARE_OF_LARGEST * kept_bytes[ranked[0]])
    return tuple(peer for peer in ranked if kept_bytes[peer] >= least)


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes received so far, at one moment."""

    at_s: float
    by_connection: Mapping[Connection, int]
    handed_by_peer: Mapping[str, int]
    heard: int
    """Bytes of gossip, from all peers together."""


class Traffic:
    """The incoming bytes of the last few seconds, by peer."""

    def __init__(
        self,
        *,
        count: Callable[[frozenset[int]], dict[Connection, int] | None] = received_bytes,
        clock: Callable[[], float] = time.monotonic,
        relays: bool = False,
    ) -> None:
        self._relayed_bytes = RELAYED_BYTES if relays else 0
        self._count = count
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._handed: Counter[str] = Counter()
        self._heard = 0
        self._expected: dict[str, int] = {}
        self._behind: dict[str, str] = {}
        """Peers at a relay, and the relay, whose connection brings what they send."""
        self._met: set[str] = set()
        """Peers that something came from since the last sample."""
        self._offences: OrderedDict[str, int] = OrderedDict()

    def handed(self, peer_id: str, size_bytes: int) -> None:
        """Records bytes of this peer that the daemon handed to us."""
        self._met.add(peer_id)
        self._handed[peer_id] += size_bytes

    def expects(self, peer_id: str, size_bytes: int) -> None:
        """Allows this peer so many unread bytes, for as long as it is connected."""
        self._met.add(peer_id)
        self._expected[peer_id] = max(size_bytes, self._expected.get(peer_id, 0))

    def streams_with(self, peer_id: str) -> bool:
        """Returns True if long-lived streams with this peer were opened since it connected."""
        return self._expected.get(peer_id, 0) >= STREAMED_BYTES

    def heard(self, size_bytes: int) -> None:
        """Records a gossip message. The peers that passed it on are not known."""
        self._heard += size_bytes + GOSSIP_ENVELOPE_BYTES

    def kept_bytes(
        self, own_addresses: Iterable[str], connections: Iterable[PeerAddresses]
    ) -> dict[str, int]:
        """Returns the bytes of each connected peer within the window that did not reach us; empty if unknown.
        Call it regularly: each call is also a sample for later ones."""
        connections = list(connections)
        self._credit_relays(connections)
        # Whoever came while the daemon was asked is not among its connections yet.
        here = {peer.peer_id for peer in connections} | self._met
        self._met.clear()
        self._handed = Counter({peer: self._handed[peer] for peer in self._handed.keys() & here})
        self._expected = {peer: self._expected[peer] for peer in self._expected.keys() & here}
        received = self._count(frozenset(port for _, port in _ends(own_addresses)))
        if received is None:
            return {}
        now_s = self._clock()
        while len(self._samples) > 1 and self._samples[1].at_s <= now_s - WINDOW_S:
            self._samples.popleft()
        before = self._samples[0] if self._samples else None
        self._samples.append(Sample(now_s, received, dict(self._handed), self._heard))
        owners = {end: peer.peer_id for peer in connections for end in _ends(peer.addresses)}
        kept: Counter[str] = Counter()
        for (port, address, remote_port), size_bytes in received.items():
            owner = owners.get((address, remote_port))
            if owner is not None:
                connection = (port, address, remote_port)
                kept[owner] += size_bytes - (before.by_connection.get(connection, 0) if before else 0)
        for peer in kept:
            handed_before = before.handed_by_peer.get(peer, 0) if before else 0
            kept[peer] -= self._handed[peer] - handed_before
        return {peer: size_bytes for peer, size_bytes in kept.items() if size_bytes > 0}

    def _credit_relays(self, connections: Sequence[PeerAddresses]) -> None:
        """Counts bytes from peers behind a relay as the relay's, whose connection brings them."""
        behind = {peer.peer_id: relay for peer in connections for relay in _relays(peer.addresses)}
        last: Mapping[str, int] = self._samples[-1].handed_by_peer if self._samples else {}
        for peer, relay in (self._behind | behind).items():
            self.handed(relay, max(0, self._handed[peer] - last.get(peer, 0)))
            self.expects(relay, self._expected.get(peer, 0))
        self._behind = behind

    def flooders(self, kept_bytes: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the peers that sent more than FLOOD_BYTES besides their allowance and all gossip that they
        could have passed on. `kept_bytes`: as just counted."""
        before = self._samples[0].heard if len(self._samples) > 1 else 0
        most = FLOOD_BYTES + GOSSIP_COPIES * (self._heard - before) + self._relayed_bytes
        return tuple(
            peer for peer, size_bytes in kept_bytes.items() if size_bytes > most + self._expected.get(peer, 0)
        )

    def bar_for_s(self, peer_id: str) -> float:
        """Returns the seconds to bar a blamed peer, and counts its offence."""
        offences = self._offences.pop(peer_id, 0)
        self._offences[peer_id] = offences + 1
        if len(self._offences) > MAX_OFFENDERS:
            self._offences.popitem(last=False)
        return min(LONGEST_BAR_S, FIRST_BAR_S * 4.0 ** min(offences, 8))


def _ends(addresses: Iterable[str]) -> set[tuple[str, int]]:
    """Yields (IP address, TCP port) of the addresses that have both and are not relayed."""
    ends: set[tuple[str, int]] = set()
    for address in addresses:
        if is_relayed(address):
            continue
        try:
            components = dict(parse_address(address))
        except NetworkError:
            continue
        ip = components.get("ip4") or components.get("ip6")
        if ip and "tcp" in components:
            ends.add((ip, int(components["tcp"])))
    return ends


def _relays(addresses: Iterable[str]) -> Iterator[str]:
    """Yields the relays of the relayed addresses."""
    for address in addresses:
        head, circuit, _ = address.partition("/p2p-circuit")
        if circuit:
            yield head.rpartition("/p2p/")[2]

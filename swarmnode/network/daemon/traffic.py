"""The incoming traffic of the last seconds by peer, which tells whose bytes made the daemon grow.

received_bytes.py, P2pdHost, StreamServer -> [Traffic] -> PeerGate
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import NetworkError
from swarmnode.network.daemon.control_client import PeerAddresses
from swarmnode.network.daemon.received_bytes import Connection, received_bytes
from swarmnode.network.multiaddr import is_relayed, parse_address

WINDOW_S = 5.0

MAX_SAMPLES = 8

LEAST_BLAME_BYTES = 256 * 1024
"""Fewest bytes within the window for which a peer is blamed. Eight honest neighbours' gossip stays below."""

FLOOD_BYTES = 2 * 2**20
"""Most bytes of an honest peer within the window, besides gossip: two bodies that came too late to be read.
Seven thousand provider records amount to as many, and keep the daemon busy for a sixth of a second."""

STREAMED_BYTES = 64 * 2**20
"""Additional bytes that may wait in the daemon from a peer with open streams, such as a member of a
pipeline."""

RELAYED_BYTES = 1024 * 2**20
"""Additional bytes that a relay accepts from each peer: it cannot tell passing traffic from its own."""

GOSSIP_ENVELOPE_BYTES = 256
"""Bytes of author, topic, signature and frames around a message of gossip."""

GOSSIP_COPIES = 2
"""Copies of a gossip message per neighbour: it passes one on, and announces it in up to three heartbeats."""

SHARE_OF_LARGEST = 0.25
"""Senders with at least this share of the largest sender's bytes are blamed with it."""

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
        """Peers behind a relay, each with the relay whose connection brings their bytes."""
        self._met: set[str] = set()
        """Peers from which something came since the last sample."""
        self._offences = BoundedDict[str, int](MAX_OFFENDERS)

    def note_handed(self, peer_id: str, size_bytes: int) -> None:
        """Records bytes of this peer that the daemon handed to us."""
        self._met.add(peer_id)
        self._handed[peer_id] += size_bytes

    def allow(self, peer_id: str, size_bytes: int) -> None:
        """Allows this peer this many unread bytes, for as long as it is connected."""
        self._met.add(peer_id)
        self._expected[peer_id] = max(size_bytes, self._expected.get(peer_id, 0))

    def has_streams_with(self, peer_id: str) -> bool:
        """Returns True if long-lived streams with this peer were opened since it connected."""
        return self._expected.get(peer_id, 0) >= STREAMED_BYTES

    def note_gossip(self, size_bytes: int) -> None:
        """Records a gossip message. We do not know which peers passed it on."""
        self._heard += size_bytes + GOSSIP_ENVELOPE_BYTES

    def kept_bytes(
        self, own_addresses: Iterable[str], connections: Iterable[PeerAddresses]
    ) -> dict[str, int]:
        """Returns the bytes of each connected peer within the window that did not reach us; empty if unknown.
        Call this regularly: each call also takes a sample for later ones."""
        connections = list(connections)
        self._credit_relays(connections)
        # Peers that connected while the daemon was asked are not among its connections yet.
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
        """Counts the bytes of peers behind a relay as the relay's, because its connection brings them."""
        behind = {peer.peer_id: relay for peer in connections for relay in _relays(peer.addresses)}
        last: Mapping[str, int] = self._samples[-1].handed_by_peer if self._samples else {}
        for peer, relay in (self._behind | behind).items():
            self.note_handed(relay, max(0, self._handed[peer] - last.get(peer, 0)))
            self.allow(relay, self._expected.get(peer, 0))
        self._behind = behind

    def flooders(self, kept_bytes: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the peers that sent more than FLOOD_BYTES beyond their allowance and all gossip that they
        could have passed on. `kept_bytes`: as just counted."""
        before = self._samples[0].heard if len(self._samples) > 1 else 0
        most = FLOOD_BYTES + GOSSIP_COPIES * (self._heard - before) + self._relayed_bytes
        return tuple(
            peer for peer, size_bytes in kept_bytes.items() if size_bytes > most + self._expected.get(peer, 0)
        )

    def bar_for_s(self, peer_id: str) -> float:
        """Returns the seconds to bar a blamed peer, and counts its offence."""
        offences = self._offences.get(peer_id, 0)
        self._offences[peer_id] = offences + 1
        return min(LONGEST_BAR_S, FIRST_BAR_S * 4.0 ** min(offences, 8))


def _ends(addresses: Iterable[str]) -> set[tuple[str, int]]:
    """Returns (IP address, TCP port) of the addresses that have both and are not relayed."""
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

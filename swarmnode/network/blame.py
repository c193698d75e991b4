"""Who made the daemon grow: what each peer sent it lately and it kept to itself.

tcp_bytes.py, p2pd.py (what was handed to us) -> [Traffic] -> largest_senders -> disconnected for a while

A flood that grows the daemon is control traffic, which never reaches us. So what a peer sent on streams that
we read, however much, is no part of its blame: the neighbours of a pipeline send gigabytes.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from swarmnode.errors import NetworkError
from swarmnode.network.multiaddr import parse_address
from swarmnode.network.p2pd_control import PeerAddresses
from swarmnode.network.tcp_bytes import Connection, received_bytes

WINDOW_S = 5.0
MAX_SAMPLES = 8

LEAST_BLAME_BYTES = 256 * 1024
"""The least that a blamed peer sent within the window. Eight honest neighbours' gossip stays below."""

SHARE_OF_LARGEST = 0.25
"""Whoever sent at least so much of what the largest sender did is blamed with it."""

FIRST_BAR_S = 60.0
LONGEST_BAR_S = 3600.0
"""An honest peer on a bad day is back after a minute; one that does it again waits four times longer."""

MAX_OFFENDERS = 1024


def largest_senders(kept_bytes: Mapping[str, int]) -> tuple[str, ...]:
    """The peers to be sent away, the largest first.

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


class Traffic:
    """The last few seconds of what came in, by peer."""

    def __init__(
        self,
        *,
        count: Callable[[frozenset[int]], dict[Connection, int] | None] = received_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._handed: Counter[str] = Counter()
        self._offences: OrderedDict[str, int] = OrderedDict()

    def handed(self, peer_id: str, size_bytes: int) -> None:
        """The daemon gave us so many bytes of this peer."""
        self._handed[peer_id] += size_bytes

    def kept_bytes(
        self, own_addresses: Iterable[str], connections: Iterable[PeerAddresses]
    ) -> dict[str, int]:
        """What each connected peer sent within the window and we did not get; empty when it is not known.

        To be asked regularly: each call is also a sample for the later ones.
        """
        connections = list(connections)
        self._handed = Counter({peer.peer_id: self._handed[peer.peer_id] for peer in connections})
        received = self._count(frozenset(port for _, port in _ends(own_addresses)))
        if received is None:
            return {}
        now_s = self._clock()
        while len(self._samples) > 1 and self._samples[1].at_s <= now_s - WINDOW_S:
            self._samples.popleft()
        before = self._samples[0] if self._samples else None
        self._samples.append(Sample(now_s, received, dict(self._handed)))
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

    def bar_for_s(self, peer_id: str) -> float:
        """How long to keep a peer away that is to blame, this time."""
        offences = self._offences.pop(peer_id, 0)
        self._offences[peer_id] = offences + 1
        if len(self._offences) > MAX_OFFENDERS:
            self._offences.popitem(last=False)
        return min(LONGEST_BAR_S, FIRST_BAR_S * 4.0 ** min(offences, 8))


def _ends(addresses: Iterable[str]) -> set[tuple[str, int]]:
    """(IP address, TCP port) of those addresses that have both."""
    ends: set[tuple[str, int]] = set()
    for address in addresses:
        try:
            components = dict(parse_address(address))
        except NetworkError:
            continue
        ip = components.get("ip4") or components.get("ip6")
        if ip and "tcp" in components:
            ends.add((ip, int(components["tcp"])))
    return ends

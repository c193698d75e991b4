"""The peer book: the addresses that we know and how they behaved; `next_dials` decides which to dial.

seeds, cache, Kademlia providers, mDNS -> [PeerBook] -> [next_dials] -> Discovery

Addresses that once worked are written to disk, so a node finds its swarm again even if every seed is gone.
"""

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from swarmnode.errors import StorageError
from swarmnode.machine.storage import read_kept, replace_file
from swarmnode.network.multiaddr import MAX_ADDRESSES_PER_PEER, split_peer

Source = Literal["seed", "cache", "kademlia", "mdns"]
"""Origin of an address: the user's configuration, an earlier run, the routing table, or the local network."""

MAX_ADDRESSES = 512
"""Most addresses remembered: enough to rejoin a swarm of any size, in a file below 100 KiB. Seeds are never
forgotten."""

MAX_FILE_BYTES = 1024 * 1024
"""A larger peer book is not one of ours."""

FIRST_RETRY_S = 2.0

MAX_RETRY_S = 300.0
"""Longest wait between dials of one address, in seconds: a seed that comes back after a night is found within
five minutes."""

ALONE_RETRY_S = 15.0
"""Longest wait in seconds while we are connected to nobody: a home whose line was down should soon be back in
the swarm."""


@dataclass(frozen=True, slots=True)
class KnownAddress:
    """One address and its history. Times are seconds since the epoch."""

    address: str
    """Ends in `/p2p/<peer id>`."""
    source: Source
    last_seen: float | None = None
    """Time of our last connection there. None: never."""
    failures: int = 0
    """Failed dials in a row."""
    retry_at: float = 0.0

    @property
    def peer_id(self) -> str:
        return self.address.rpartition("/p2p/")[2]


class PeerBook:
    """Known addresses, at most MAX_ADDRESSES; the least useful go first. With a path, it can be saved."""

    def __init__(self, path: Path | None = None, addresses: Iterable[KnownAddress] = ()) -> None:
        self._path = path
        self._known = {known.address: known for known in addresses}

    @classmethod
    def load(cls, path: Path) -> "PeerBook":
        """Returns the peers of an earlier run. A damaged file is set aside and logged; the node starts
        without it."""
        return cls(path, read_kept(path, "the peer book", _read, MAX_FILE_BYTES) or ())

    def save(self) -> None:
        """Writes the addresses that once worked, atomically. Raises StorageError."""
        if self._path is None:
            return
        try:
            replace_file(self._path, _encode(self))
        except OSError as error:
            raise StorageError(f"cannot write the peer book {self._path}: {error.strerror}") from error

    def __iter__(self) -> Iterator[KnownAddress]:
        return iter(tuple(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, address: str, source: Source) -> None:
        """Adds an address; a known one keeps its history. Raises NetworkError for a malformed one."""
        split_peer(address)
        known = self._known.get(address)
        if known is None:
            self._known[address] = KnownAddress(address, source)
            self._forget_surplus(self._known[address].peer_id)
        elif source == "seed":
            self._known[address] = replace(known, source=source)

    def succeeded(self, address: str, now: float) -> None:
        """Records a connection to this address."""
        known = self._known.get(address)
        if known is not None:
            self._known[address] = replace(known, last_seen=now, failures=0, retry_at=0.0)

    def failed(self, address: str, now: float, rng: random.Random, *, alone: bool = False) -> None:
        """Records a failed dial: the next one waits longer. `alone`: we are connected to nobody."""
        known = self._known.get(address)
        if known is not None:
            failures = known.failures + 1
            retry_at = now + retry_delay_s(failures, rng, ALONE_RETRY_S if alone else MAX_RETRY_S)
            self._known[address] = replace(known, failures=failures, retry_at=retry_at)

    def _forget_surplus(self, peer_id: str) -> None:
        self._forget_worst([known for known in self if known.peer_id == peer_id], MAX_ADDRESSES_PER_PEER)
        self._forget_worst(list(self), MAX_ADDRESSES)

    def _forget_worst(self, among: list[KnownAddress], keep: int) -> None:
        ranked = sorted(among, key=_worth, reverse=True)
        # Half of the places are for addresses that worked once: names that nobody tried are free, and a line
        # may be down. The other half is open, or addresses that no longer work would keep new ones out.
        worked = [known for known in ranked if known.last_seen is not None][: keep // 2]
        for known in tuple(dict.fromkeys((*worked, *ranked)))[keep:]:
            if known.source != "seed":
                del self._known[known.address]


def retry_delay_s(failures: int, rng: random.Random, longest_s: float = MAX_RETRY_S) -> float:
    """Returns an exponential back-off with jitter: if a seed comes back, the swarm must not dial it all at
    once."""
    full_s = min(longest_s, FIRST_RETRY_S * 2.0 ** min(failures - 1, 16))
    return full_s * rng.uniform(0.5, 1.0)


def next_dials(
    book: Iterable[KnownAddress], connected: Collection[str], now: float, target: int
) -> tuple[str, ...]:
    """Returns the addresses to dial now, best first: enough for `target` peers, one per peer, none before its
    time."""
    wanted = target - len(connected)
    due: dict[str, KnownAddress] = {}
    for known in sorted(book, key=_worth, reverse=True):
        # A wait longer than MAX_RETRY_S was noted before our clock was set back.
        if not now < known.retry_at <= now + MAX_RETRY_S and known.peer_id not in connected:
            due.setdefault(known.peer_id, known)
    return tuple(known.address for known in due.values())[: max(wanted, 0)]


class _SavedAddress(msgspec.Struct, frozen=True):
    address: str
    last_seen: float


class _PeerFile(msgspec.Struct, frozen=True):
    peers: list[_SavedAddress]
    version: Literal[1] = 1


def _encode(book: PeerBook) -> bytes:
    seen = [_SavedAddress(known.address, known.last_seen) for known in book if known.last_seen is not None]
    return msgspec.json.format(msgspec.json.encode(_PeerFile(peers=seen)), indent=1)


def _read(data: bytes) -> list[KnownAddress]:
    saved = msgspec.json.decode(data, type=_PeerFile).peers[:MAX_ADDRESSES]
    for entry in saved:
        split_peer(entry.address)
    return [KnownAddress(entry.address, "cache", last_seen=entry.last_seen) for entry in saved]


def _worth(known: KnownAddress) -> tuple[bool, int, float]:
    """Returns the sort key of usefulness: seeds first, then fewest failures, then latest connection."""
    return known.source == "seed", -known.failures, known.last_seen or 0.0

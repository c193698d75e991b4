"""Keeps a node attached to its swarm: remembers addresses, dials, advertises and searches, forever.

seeds, cache, Kademlia providers, the local network -> PeerBook -> next_dials -> [Discovery] -> Host.connect

If every seed is down, the node starts alone, says so, and attaches as soon as any peer appears. Nothing that
a peer or the daemon does ends `run`.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

import msgspec

from swarmnode.errors import HostDown, NetworkError, PeerBarred, StorageError
from swarmnode.network.finding.peer_book import KnownAddress, PeerBook, Source, next_dials
from swarmnode.network.finding.seed_addresses import Resolve, ask_dns, look_up
from swarmnode.network.host import Host
from swarmnode.network.multiaddr import is_for_outsiders, parse_address, scope_of
from swarmnode.network.reach import Reach, find_reach

logger = logging.getLogger(__name__)

TARGET_PEERS = 8
"""Wanted number of peers. GossipSub keeps 6 neighbours per topic and tolerates 4 to 12; others dial us."""

MAX_DIALS_AT_ONCE = 8

DIAL_TIMEOUT_S = 10.0

WATCH_INTERVAL_S = 2.0
"""Most seconds between two counts of the connections. An address that becomes due earlier is dialled then."""

FIND_INTERVAL_S = (5.0, 60.0)
"""Seconds between look-ups of the namespace: the first while peers are wanted, doubling up to the second."""

ADVERTISE_INTERVAL_S = 600.0
"""Seconds between advertisements. Provider records live for a day, but the peers that keep them come and
go."""

ADVERTISE_RETRY_S = (1.0, 60.0)

MDNS_RETRY_S = 60.0

LOOK_UP_INTERVAL_S = 3600.0

LOOK_UP_RETRY_S = 60.0
"""Seconds between two look-ups of names, while attached and while alone."""


class LocalSearch(Protocol):
    """Announces our addresses in the local network and finds those of others: the type of the registered
    part."""

    def __call__(
        self, addresses: Sequence[str], *, namespace: str, interfaces: Sequence[str]
    ) -> AbstractAsyncContextManager[AsyncIterable[Sequence[str]]]:
        """Returns a context with an endless stream of the addresses of one peer after another. `interfaces`:
        IP addresses of ours. Raises NetworkError if the machine has no multicast."""
        ...


class Discovery:
    """Finds and keeps peers for a running host.

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Discovery(host, PeerBook.load(path), seeds, swarm_id).run())
    """

    def __init__(
        self,
        host: Host,
        book: PeerBook,
        seeds: Sequence[str],
        namespace: str,
        *,
        names: Sequence[str] = (),
        resolve: Resolve = ask_dns,
        local_peers: LocalSearch | None = None,
        interfaces: Sequence[str] = (),
        asks_router: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        """`namespace`: advertised and searched for. `names`: stand for more seeds in the DNS. `asks_router`:
        the host asks the router to forward its port. `local_peers`: searches the local network, on these
        `interfaces`; None: it is not searched.

        Raises NetworkError for a malformed seed: a typing error should stop the start, not be retried."""
        for seed in seeds:
            book.learn(seed, "seed")
        self._host = host
        self._book = book
        self._namespace = namespace
        self._names = tuple(names)
        self._resolve = resolve
        self._local_peers = local_peers
        self._interfaces = tuple(interfaces)
        self._rng = rng or random.Random()
        self._attached = asyncio.Event()
        self._said_attached: bool | None = None
        self._said_barred = False
        """True once we logged, while alone, that we keep away from a peer because we barred it."""
        self._twin = ""
        """What was seen of another node with our identity, in words. Empty: nothing."""
        self._news = asyncio.Event()
        self._reach = find_reach(host, self._dialled, asks_router=asks_router)

    @property
    def reach(self) -> Reach:
        """Reachability of this node from outside, as far as peers have found it out."""
        found = Reach() if self._reach is None else self._reach.reach
        return msgspec.structs.replace(found, text=f"{self._twin}; {found.text}") if self._twin else found

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._dial_forever())
            tasks.create_task(self._advertise_forever())
            tasks.create_task(self._find_forever())
            if self._reach is not None:
                tasks.create_task(self._reach.run())
            if self._names:
                tasks.create_task(self._look_up_forever())
            if self._local_peers is not None:
                tasks.create_task(self._browse_forever(self._local_peers))

    async def _dial_forever(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._dial_due(await self._host.peers())
                self._report(await self._host.peers())
            except NetworkError as error:
                logger.debug("not dialling: %s", error)
            await self._pause()

    async def _pause(self) -> None:
        # Not wait_for: on Python 3.11 it loses a cancellation that arrives together with the news.
        with suppress(TimeoutError):
            async with asyncio.timeout(WATCH_INTERVAL_S):
                await self._news.wait()

    async def _dial_due(self, connected: Sequence[str]) -> None:
        due = next_dials(self._others(), connected, time.time(), TARGET_PEERS)[:MAX_DIALS_AT_ONCE]
        async with asyncio.TaskGroup() as tasks:
            dials = [tasks.create_task(self._dial(address)) for address in due]
        if any(dial.result() for dial in dials):
            self._save()

    async def _dial(self, address: str) -> bool:
        try:
            await self._host.connect(address, timeout_s=DIAL_TIMEOUT_S)
        except HostDown:
            return False  # says nothing about the peer
        except NetworkError as error:
            logger.debug("%s", error)
            if isinstance(error, PeerBarred) and not self._attached.is_set() and not self._said_barred:
                self._said_barred = True
                logger.warning("%s; `swarmnode peers` shows why", error)
            self._book.failed(address, time.time(), self._rng, alone=not self._attached.is_set())
            return False
        self._book.succeeded(address, time.time())
        return True

    def _report(self, connected: Sequence[str]) -> None:
        """Logs a change between attached and alone, once."""
        if connected:
            self._attached.set()
        else:
            self._attached.clear()
        if self._said_attached == bool(connected):
            return
        self._said_attached, self._said_barred = bool(connected), False
        if connected:
            logger.info("attached to %s", _count(len(connected), "peer"))
        else:
            logger.warning("%s", self._why_alone())

    def _why_alone(self) -> str:
        others = self._others()
        if not others:
            named = f"; {_count(len(self._names), 'name')} not resolved" if self._names else ""
            return f"alone: no seed and no known peer{named}; waiting for others to dial us"
        seeds = sum(known.source == "seed" for known in others)
        retry_in_s = max(0.0, min(known.retry_at for known in others) - time.time())
        tried = (_count(seeds, "seed"), _count(len(others) - seeds, "other known address"))
        return f"alone: {' and '.join(filter(None, tried))} unreachable, retrying in {retry_in_s:.0f} s"

    def _others(self) -> list[KnownAddress]:
        # Every node of a swarm may be given the same seeds, the seeds themselves included.
        return [known for known in self._book if known.peer_id != self._host.peer_id]

    def _dialled(self) -> dict[str, str]:
        """Returns the connected peers that we dialled at a public address, with that address."""
        open_to_us = (known for known in self._others() if known.last_seen is not None and not known.failures)
        return {known.peer_id: known.address for known in open_to_us if is_for_outsiders(known.address)}

    def _save(self) -> None:
        try:
            self._book.save()
        except StorageError as error:
            logger.warning("%s; peers found now will be forgotten at a restart", error)

    async def _advertise_forever(self) -> None:
        first_retry_s, last_retry_s = ADVERTISE_RETRY_S
        retry_s = first_retry_s
        while True:
            await self._attached.wait()
            try:
                await self._host.advertise(self._namespace)
            except NetworkError as error:
                logger.debug("not advertised: %s", error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, last_retry_s)
            else:
                retry_s = first_retry_s
                await asyncio.sleep(ADVERTISE_INTERVAL_S)

    async def _find_forever(self) -> None:
        shortest_s, longest_s = FIND_INTERVAL_S
        pause_s = shortest_s
        while True:
            if not self._attached.is_set():
                pause_s = shortest_s
            await self._attached.wait()
            try:
                for address in await self._host.find(self._namespace):
                    self._learn(address, "kademlia")
            except NetworkError as error:
                logger.debug("not looked up: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _look_up_forever(self) -> None:
        while True:
            for name in self._names:
                try:
                    for address in await look_up(name, self._resolve):
                        self._learn(address, "seed")
                except NetworkError as error:
                    logger.debug("%s", error)
            await asyncio.sleep(LOOK_UP_INTERVAL_S if self._attached.is_set() else LOOK_UP_RETRY_S)

    async def _browse_forever(self, local_peers: LocalSearch) -> None:
        while True:
            try:
                await self._browse(local_peers)
            except NetworkError as error:
                logger.warning("mDNS is off: %s; retrying in %.0f s", error, MDNS_RETRY_S)
            await asyncio.sleep(MDNS_RETRY_S)

    async def _browse(self, local_peers: LocalSearch) -> None:
        """Searches local networks, and only those: no public address is announced there or taken from
        there."""
        own = [address for address in await self._host.addresses() if scope_of(address) != "public"]
        interfaces = self._interfaces or _local_ips(own)
        if not interfaces:
            return
        async with local_peers(own, namespace=self._namespace, interfaces=interfaces) as local:
            async for addresses in local:
                for address in addresses:
                    if scope_of(address) != "public":
                        self._learn(address, "mdns")
                        # A gateway between networks may still tell what we announced before a crash.
                        if address not in own:
                            self._look_for_twin(address)

    def _look_for_twin(self, address: str) -> None:
        """Warns, once, if this address, which another node announces, bears our peer id. Nothing else shows a
        twin: libp2p drops gossip that claims to be ours, and does not dial our own peer id."""
        if not self._twin and address.endswith(f"/p2p/{self._host.peer_id}"):
            self._twin = f"another node with this node's identity was seen at {address}"
            logger.warning(
                "%s: others hear neither of the two reliably; stop one, move its identity/node.key away and"
                " start it again, so that it makes a key of its own",
                self._twin,
            )

    def _learn(self, address: str, source: Source) -> None:
        try:
            self._book.learn(address, source)
        except NetworkError as error:
            logger.debug("%s", error)
        else:
            self._news.set()


def _local_ips(addresses: Iterable[str]) -> tuple[str, ...]:
    """Returns our IPv4 addresses in private ranges."""
    hosts = (parse_address(address)[0] for address in addresses if scope_of(address) == "lan")
    return tuple(dict.fromkeys(host for kind, host in hosts if kind == "ip4"))


def _count(number: int, noun: str) -> str:
    """Returns a count in words: 1 seed, 2 seeds, 2 addresses; empty for none."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural if number > 1 else ''}" if number else ""

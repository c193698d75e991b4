"""A network within one process, for tests: gossip with seeded loss and delay, partitions, hosts that go down.

test -> [MemoryNetwork] makes MemoryHosts -> anything that takes a Host

It keeps the rules of the real one. Only connected peers gossip, and only through peers that subscribe to the
topic. A peer cannot be found unless somebody in reach is connected to it. A host that is down raises
HostDown, and its subscriptions and services work again afterwards.

    network = MemoryNetwork(seed=1, loss=0.1)
    async with network.host() as alice, network.host() as bob:
        await alice.connect((await bob.addresses())[0])
"""

import asyncio
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Self

from swarmnode.errors import HostDown, MessageTooLarge, PeerBarred, PeerUnreachable, RequestTimeout
from swarmnode.network.barred_peers import BarredPeers
from swarmnode.network.host import MAX_GOSSIP_BYTES, Handler, HostState, HostStatus, Message
from swarmnode.network.memory_stream import MemoryStream, memory_streams
from swarmnode.network.message_queue import MessageQueue, as_heard
from swarmnode.network.multiaddr import check_peer_id, peer_id_from_bytes, split_peer
from swarmnode.network.rpc import Service, respond
from swarmnode.network.skip_counters import SkipCause, SkipCounters, oversized_story
from swarmnode.network.streams import StreamHandler, handle_stream

logger = logging.getLogger(__name__)


class MemoryNetwork:
    """The wires of a simulated network. The same seed and the same calls give the same losses and delays."""

    def __init__(
        self, *, seed: int = 0, loss: float = 0.0, delay_s: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """`loss` is the share of gossip deliveries that are lost; `delay_s` bounds the delay of the
        others."""
        if not 0.0 <= loss <= 1.0:
            raise ValueError(f"loss is {loss}, it must lie between 0 and 1")
        self._seed = seed
        self._loss = loss
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._hosts: dict[str, MemoryHost] = {}
        self._links: set[frozenset[str]] = set()
        self._groups: dict[str, int] | None = None
        self._providers: dict[str, set[str]] = {}
        self._hosts_made = 0
        self._cuts: Counter[str] = Counter()

    def host(
        self, peer_id: str | None = None, *, dialable: bool = True, ip: str = "127.0.0.1"
    ) -> "MemoryHost":
        """Returns a new host, to be entered with `async with`. Without a peer id it gets one drawn from the
        seed.

        One that is not dialable is behind a router: it dials others, and nobody dials it. `ip`: the IPv4
        address at which others see it."""
        self._hosts_made += 1
        if peer_id is None:
            key = hashlib.sha256(f"{self._seed}/{self._hosts_made}".encode()).digest()
            peer_id = peer_id_from_bytes(bytes.fromhex("002408011220") + key)
        return MemoryHost(self, check_peer_id(peer_id), port=self._hosts_made, dialable=dialable, ip=ip)

    def partition(self, groups: "Iterable[Iterable[MemoryHost]]") -> None:
        """Cuts the wires between groups; hosts that are in no group form one of their own.

        Connections live through it unused, as TCP connections do through a short outage.
        """
        self._groups = {host.peer_id: number for number, group in enumerate(groups, 1) for host in group}

    def heal(self) -> None:
        """Mends every wire."""
        self._groups = None

    def join(self, host: "MemoryHost") -> None:
        """Called by a host that starts."""
        if host.peer_id in self._hosts:
            raise ValueError(f"{host.peer_id} is already on this network")
        self._hosts[host.peer_id] = host

    def leave(self, host: "MemoryHost") -> None:
        """Called by a host that closes: its connections and provider records go with it."""
        self._hosts.pop(host.peer_id, None)
        self.unlink(host.peer_id)
        for providers in self._providers.values():
            providers.discard(host.peer_id)

    def dial(self, peer_id: str, address: str) -> str:
        """Connects a host to an address and returns the peer id there. Raises PeerUnreachable,
        NetworkError."""
        _, other = split_peer(address)
        host = self._hosts.get(other)
        if host is None or host.address != address:
            raise PeerUnreachable(f"no connection to {address}: nobody answers there")
        self.link(peer_id, other)
        return other

    def link(self, one: str, other: str) -> None:
        """Connects two hosts. Raises PeerUnreachable."""
        if one == other or not self._wired(one, other) or self._barred(one, other):
            raise PeerUnreachable(f"no connection to {other}")
        if not self._hosts[other].dialable and frozenset((one, other)) not in self._links:
            raise PeerUnreachable(f"no connection to {other}: it is behind a router")
        self._links.add(frozenset((one, other)))

    def unlink(self, peer_id: str) -> None:
        """Cuts every connection of a host."""
        self._links = {link for link in self._links if peer_id not in link}
        self._cuts[peer_id] += 1

    def separate(self, one: str, other: str) -> None:
        """Cuts the connection between two hosts."""
        self._links.discard(frozenset((one, other)))

    def neighbours(self, peer_id: str) -> tuple[str, ...]:
        """Returns the peers with a usable connection to `peer_id`, sorted."""
        linked = (peer for link in self._links if peer_id in link for peer in link - {peer_id})
        return tuple(sorted(peer for peer in linked if self._wired(peer_id, peer)))

    def far_ends(self, peer_id: str) -> dict[str, tuple[str, ...]]:
        """Returns the addresses at which `peer_id` sees each of its neighbours."""
        return {peer: (split_peer(self._hosts[peer].address)[0],) for peer in self.neighbours(peer_id)}

    def reachable(self, peer_id: str, through: "Callable[[MemoryHost], bool]") -> tuple["MemoryHost", ...]:
        """Returns the hosts that connections lead to, if each host on the way, and the last, passes
        `through`."""
        found: dict[str, MemoryHost] = {}
        frontier = [peer_id]
        while frontier:
            for neighbour in self.neighbours(frontier.pop()):
                host = self._hosts[neighbour]
                if neighbour != peer_id and neighbour not in found and through(host):
                    found[neighbour] = host
                    frontier.append(neighbour)
        return tuple(found.values())

    def gossip(self, message: Message) -> None:
        """Delivers to every subscriber in reach, now or after a delay drawn for each, except for losses."""
        for host in self.reachable(message.sender, lambda host: host.is_subscribed(message.topic)):
            if self._random.random() < self._loss:
                continue
            delay_s = self._random.uniform(*self._delay_s)
            if delay_s > 0:
                asyncio.get_running_loop().call_later(delay_s, host.deliver, message)
            else:
                host.deliver(message)

    def stream(self, one: str, other: str) -> tuple[MemoryStream, MemoryStream]:
        """Returns both ends of a new stream. Each piece is delayed like gossip, and none is lost."""
        cuts = self._cuts[one], self._cuts[other]

        def state() -> str:
            if cuts != (self._cuts[one], self._cuts[other]):
                return "lost"
            return "up" if self._wired(one, other) else "cut"

        return memory_streams(one, other, state, lambda: self._random.uniform(*self._delay_s))

    def provide(self, namespace: str, peer_id: str) -> None:
        """Records that `peer_id` belongs to `namespace`."""
        self._providers.setdefault(namespace, set()).add(peer_id)

    def providers(self, namespace: str) -> set[str]:
        return self._providers.get(namespace, set())

    def _barred(self, one: str, other: str) -> bool:
        return self._hosts[one].bars(other) or self._hosts[other].bars(one)

    def _wired(self, one: str, other: str) -> bool:
        ends = (self._hosts.get(one), self._hosts.get(other))
        if any(end is None or not end.is_up for end in ends):
            return False
        return self._groups is None or self._groups.get(one, 0) == self._groups.get(other, 0)


class MemoryHost:
    """A `Host` on a `MemoryNetwork`. Made by `MemoryNetwork.host`."""

    may_publish: Container[str] | None = None

    def __init__(
        self, network: MemoryNetwork, peer_id: str, port: int, *, dialable: bool = True, ip: str = "127.0.0.1"
    ) -> None:
        self._network = network
        self.dialable = dialable
        self._peer_id = peer_id
        self.address = f"/ip4/{ip}/tcp/{port}/p2p/{peer_id}"
        self._status = HostStatus("starting", time.time(), 0, "")
        self._queues: list[MessageQueue] = []
        self._services: dict[str, Service] = {}
        self._stream_handlers: dict[str, StreamHandler] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._redial: tuple[str, ...] = ()
        self._barred = BarredPeers()
        self._skipped = SkipCounters()

    @property
    def peer_id(self) -> str:
        return self._peer_id

    async def __aenter__(self) -> Self:
        self._network.join(self)
        self._set_state("up")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._network.leave(self)
        for queue in tuple(self._queues):
            queue.close()
        self._set_state("closed")
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def go_down(self, reason: str = "taken down by the test") -> None:
        """Behaves like a host whose daemon died: connections are gone, calls raise HostDown."""
        self._redial = self._network.neighbours(self._peer_id)
        self._network.unlink(self._peer_id)
        self._set_state("restarting", reason)

    def come_back(self) -> None:
        """Behaves like a host whose daemon was restarted: connects again to the peers that are still
        there."""
        self._status = HostStatus("up", time.time(), self._status.restarts + 1, "")
        for peer_id in self._redial:
            try:
                self._network.link(self._peer_id, peer_id)
            except PeerUnreachable:
                logger.debug("%s is gone, not redialled", peer_id)

    @property
    def is_up(self) -> bool:
        """True if it can be reached now."""
        return self._status.state == "up"

    def status(self) -> HostStatus:
        return replace(self._status, skipped=self._skipped.counts())

    async def addresses(self) -> tuple[str, ...]:
        self._check_up()
        return (self.address,)

    async def peers(self) -> tuple[str, ...]:
        self._check_up()
        return self._network.neighbours(self._peer_id)

    async def far_ends(self) -> dict[str, tuple[str, ...]]:
        self._check_up()
        return self._network.far_ends(self._peer_id)

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> str:
        self._check_up()
        if split_peer(address)[1] in self._barred:
            raise PeerBarred(f"we banned {address} for a while")
        return self._network.dial(self._peer_id, address)

    async def disconnect(self, peer_id: str, *, barred_s: float = 0.0) -> None:
        self._barred.bar(check_peer_id(peer_id), barred_s)
        self._check_up()
        self._network.separate(self._peer_id, peer_id)

    async def publish(self, topic: str, data: bytes) -> None:
        self._check_up()
        if len(data) > MAX_GOSSIP_BYTES:
            raise MessageTooLarge(f"a gossip message of {len(data)} bytes exceeds {MAX_GOSSIP_BYTES} bytes")
        self._network.gossip(Message(topic, self._peer_id, data))

    async def subscribe(self, topic: str, *, queue_size: int = 1024) -> MessageQueue:
        self._check_up()
        queue = MessageQueue(topic, queue_size, self._queues.remove)
        self._queues.append(queue)
        return queue

    async def serve(self, protocol: str, handler: Handler, *, max_request_bytes: int) -> None:
        self._check_up()
        self._services[protocol] = Service(protocol, handler, max_request_bytes)

    async def request(
        self, peer_id: str, protocol: str, data: bytes, *, timeout_s: float = 10.0, max_response_bytes: int
    ) -> bytes:
        self._check_up()
        peer = self._find_peer(check_peer_id(peer_id))
        try:
            async with asyncio.timeout(timeout_s):
                response = await peer.handle(self._peer_id, protocol, data)
        except TimeoutError as error:
            raise RequestTimeout(f"{peer_id} did not answer within {timeout_s:g} s") from error
        self._check_up()
        if response is None or peer_id not in self._network.neighbours(self._peer_id):
            raise PeerUnreachable(f"{peer_id} closed the stream without an answer")
        if len(response) > max_response_bytes:
            raise MessageTooLarge(f"a response of {len(response)} bytes exceeds {max_response_bytes} bytes")
        return response

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        self._check_up()
        self._stream_handlers[protocol] = handler

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> MemoryStream:
        self._check_up()
        peer = self._find_peer(check_peer_id(peer_id))
        ours, theirs = self._network.stream(self._peer_id, peer_id)
        if not peer.take_stream(theirs, protocol):
            raise PeerUnreachable(f"{peer_id} does not speak {protocol}")
        return ours

    async def advertise(self, namespace: str, *, timeout_s: float = 10.0) -> None:
        self._check_up()
        if not self._network.neighbours(self._peer_id):
            raise PeerUnreachable("no peer is connected that could keep the announcement")
        self._network.provide(namespace, self._peer_id)

    async def find(self, namespace: str, *, limit: int = 16, timeout_s: float = 10.0) -> tuple[str, ...]:
        self._check_up()
        providers = self._network.providers(namespace)
        found = (host for host in self._everyone_in_reach() if host.peer_id in providers)
        return tuple(host.address for host in found)[:limit]

    def bars(self, peer_id: str) -> bool:
        return peer_id in self._barred

    def is_subscribed(self, topic: str) -> bool:
        return any(queue.topic == topic for queue in self._queues)

    def deliver(self, message: Message) -> None:
        """Called by the network with a message for one of our subscriptions."""
        if not self.is_up:
            return
        heard = as_heard(message.topic, message.sender, message.data)
        if heard.oversized:
            self._skipped.note(SkipCause.GOSSIP_SIZE, oversized_story(message.sender, len(message.data)))
        for queue in tuple(self._queues):
            if queue.topic == message.topic:
                queue.put(heard)

    async def handle(self, peer_id: str, protocol: str, request: bytes) -> bytes | None:
        """Called by a peer with a request. Returns None if it is refused."""
        service = self._services.get(protocol)
        if service is None or len(request) > service.max_request_bytes:
            return None
        return await respond(service, peer_id, request)

    def take_stream(self, stream: MemoryStream, protocol: str) -> bool:
        """Called by a peer that opens a stream. Returns False if it is refused."""
        handler = self._stream_handlers.get(protocol)
        if handler is None:
            return False
        # This host owns the task and cancels it when it closes; no task group could hold it meanwhile.
        task = asyncio.ensure_future(handle_stream(stream, protocol, handler))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return True

    def _everyone_in_reach(self) -> tuple["MemoryHost", ...]:
        return self._network.reachable(self._peer_id, lambda _: True)

    def _find_peer(self, peer_id: str) -> "MemoryHost":
        for host in self._everyone_in_reach():
            if host.peer_id == peer_id:
                self._network.link(self._peer_id, peer_id)
                return host
        raise PeerUnreachable(f"no connection to {peer_id}, and nobody we know can tell its address")

    def _check_up(self) -> None:
        if not self.is_up:
            detail = self._status.detail or "it is not running"
            raise HostDown(f"the host is {self._status.state}: {detail}")

    def _set_state(self, state: HostState, detail: str = "") -> None:
        self._status = HostStatus(state, time.time(), self._status.restarts, detail)
